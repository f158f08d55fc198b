/* Attention between the product that makes queries, keys and values and the product behind it, forth and back.

   A row of `packed` holds the queries of all heads, then the keys, then the values. Head by head they are brought to
   scratch that stays in the nearest cache; queries go through in blocks, one a lane of the vectors, so that the largest
   score and the sum of a query's shares need no sums across lanes. Back, the shares are made anew from two numbers a
   query, as in Dao et al., FlashAttention, 2022. Python's lock is let go meanwhile. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LANES 16
#define ROWS 8 /* what numbers of rows are rounded up to */
#define LONGEST (1L << 20)
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    long samples, length, heads, size;
    float scale;           /* of the scores */
    const float *packed;   /* samples x length x 3 x heads x size */
    float *mixed;          /* samples x length x heads x size */
    const float *gradient; /* of it */
    float *scales;         /* samples x heads x 2 x length: the largest score of a query, and 1 / sum of its shares */
    float *slopes;         /* the gradient of packed */
    /* Scratch, for one head; sizes and lengths are rounded up; what is beyond is zero, or leads nowhere. */
    float *keys, *values, *key_slopes, *value_slopes; /* length x size */
    float *queries, *query_slopes, *pulls;            /* block x size; pulls are the gradient of what comes out */
    float *queries_across, *pulls_across;             /* size x block */
    float *shares, *share_slopes;                     /* length x block: a key a row, a query a lane */
} Attention;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CHOICES 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#define TALL 8
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#include "attention_pass.h"
#undef NAME
#undef LANES
#undef TALL
#undef LOW
#undef HIGH
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME(x) x##_avx2
#define LANES 8
#define TALL 4
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#include "attention_pass.h"
#undef NAME
#undef LANES
#undef TALL
#undef LOW
#undef HIGH
#pragma GCC pop_options
#endif
#define NAME(x) x##_any
#define LANES 8
#define TALL 4
#define LOW 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH 4, 12, 5, 13, 6, 14, 7, 15
#include "attention_pass.h"

/* Vectors that a head or a sequence would fill by half at most are left to the narrower ones. */
static void pass(const Attention *a, int backwards) {
#ifdef CHOICES
    if (a->size > 8 && a->length > 8 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        backwards ? back_avx512(a) : forth_avx512(a);
        return;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        backwards ? back_avx2(a) : forth_avx2(a);
        return;
    }
#endif
    backwards ? back_any(a) : forth_any(a);
}

/* The numbers of an array of these sizes, whose length is so made sure of; NULL with an error set if it is another. */
static float *numbers(PyObject *given, Py_buffer *view, const char *name, int writable, int dimensions,
                      const long *sizes) {
    if (PyObject_GetBuffer(given, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) {
        view->obj = NULL;
        return NULL;
    }
    int right = view->ndim == dimensions && view->format && !strcmp(view->format, "f");
    for (int i = 0; right && i < dimensions; i++) right = sizes[i] < 0 || view->shape[i] == sizes[i];
    if (right) return view->buf;
    PyErr_Format(PyExc_ValueError, "%s must be of float32 and have the sizes that go with the rest", name);
    return NULL;
}

static PyObject *run(PyObject *args, int backwards) {
    enum { PACKED, MIXED, SCALES, SLOPES, ALL };
    PyObject *given[ALL] = {0};
    Py_buffer view[ALL] = {0};
    Attention a = {0};
    float *scratch = NULL;
    if (!PyArg_ParseTuple(args, backwards ? "fOOOO" : "fOOO", &a.scale, given + PACKED, given + MIXED, given + SCALES,
                          given + SLOPES))
        return NULL;
    if (!(a.packed = numbers(given[PACKED], view + PACKED, "the rows", 0, 3, (long[]){-1, -1, -1}))) goto done;
    a.samples = view[PACKED].shape[0], a.length = view[PACKED].shape[1];
    const long scales[] = {a.samples, -1, 2, a.length}, width = view[PACKED].shape[2];
    if (!(a.scales = numbers(given[SCALES], view + SCALES, "the scales", !backwards, 4, scales))) goto done;
    a.heads = view[SCALES].shape[1];
    if (a.heads < 1 || width < 3 || width % (3 * a.heads) || a.length < 1 || a.length > LONGEST || width > LONGEST) {
        PyErr_SetString(PyExc_ValueError, "a row must hold as many queries as keys and values, the same for each head");
        goto done;
    }
    a.size = width / 3 / a.heads;
    const long mixed[] = {a.samples, a.length, width / 3}, slopes[] = {a.samples, a.length, width};
    if (!(a.mixed = numbers(given[MIXED], view + MIXED, "what comes out", !backwards, 3, mixed))) goto done;
    a.gradient = a.mixed;
    if (backwards && !(a.slopes = numbers(given[SLOPES], view + SLOPES, "the slopes", 1, 3, slopes))) goto done;
    const size_t size = (size_t)(a.size + MOST_LANES - 1) / MOST_LANES * MOST_LANES;
    const size_t length = (size_t)(a.length + MOST_LANES - 1) / MOST_LANES * MOST_LANES, block = 2 * MOST_LANES;
    if (!(scratch = calloc(4 * length * size + 5 * block * size + 2 * length * block + MOST_LANES, sizeof(float)))) {
        PyErr_NoMemory();
        goto done;
    }
    float *at = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
    float **of_length[] = {&a.keys, &a.values, &a.key_slopes, &a.value_slopes};
    float **of_block[] = {&a.queries, &a.query_slopes, &a.pulls, &a.queries_across, &a.pulls_across};
    for (int i = 0; i < 4; i++, at += length * size) *of_length[i] = at;
    for (int i = 0; i < 5; i++, at += block * size) *of_block[i] = at;
    a.shares = at, a.share_slopes = at + length * block;
    Py_BEGIN_ALLOW_THREADS
    pass(&a, backwards);
    Py_END_ALLOW_THREADS
done:
    free(scratch);
    for (int i = 0; i < ALL; i++)
        if (view[i].obj) PyBuffer_Release(&view[i]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *attention_forth(PyObject *self, PyObject *args) { return run(args, 0); }

static PyObject *attention_back(PyObject *self, PyObject *args) { return run(args, 1); }

static PyMethodDef methods[] = {
    {"forth", attention_forth, METH_VARARGS,
     "forth(scale, packed, mixed, scales)\n\n"
     "Write softmax(scale q k') v to `mixed` (N x L x width), head by head, of `packed` (N x L x 3 width); "
     "`scales` (N x heads x 2 x L) get what `back` needs."},
    {"back", attention_back, METH_VARARGS,
     "back(scale, packed, gradient, scales, slopes)\n\n"
     "Write to `slopes` the gradient of `packed`, given that of `mixed`."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_attention", "Attention of short sequences.", -1,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__attention(void) { return PyModule_Create(&definition); }
