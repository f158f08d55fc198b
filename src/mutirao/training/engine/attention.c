/* Attention between the product that makes queries, keys and values and the product behind it, forth and back.

   A row of `packed` holds the queries of all heads, then the keys, then the values. Head by head they are brought to
   scratch that stays in the nearest cache; queries go through in blocks, one a lane of the vectors, so that the largest
   score and the sum of a query's shares need no sums across lanes. Back, the shares are made anew from two numbers a
   query, as in Dao et al., FlashAttention, 2022. Python's lock is let go meanwhile. */

#include "kernel.h"

#define MOST_LANES 16
#define ROWS 8 /* what numbers of rows are rounded up to */
#define CHUNK 32L /* rows that go through the dense layers together */
#define LONGEST (1L << 20)

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

/* The weights of an encoder layer, in the order in which they are handed over. */
enum { W_IN, B_IN, W_OUT, B_OUT, BY_1, PLUS_1, W_1, B_1, W_2, B_2, BY_2, PLUS_2, WEIGHTS };

typedef struct {
    Attention attention;
    long width, hidden, together; /* samples that go through together */
    float least[2];               /* what the squares of the spreads are raised by */
    const float *x, *weight[WEIGHTS], *gradient;
    float *y, *packed, *mixed, *hat[2], *inner, *spread; /* packed to spread are kept to go back */
    float *x_slopes, *weight_slopes[WEIGHTS], *scratch;
} Encoder;

#ifdef CHOICES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#define TALL 8
#define LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#include "attention_pass.h"
#include "encoder_pass.h"
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
#include "encoder_pass.h"
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
#include "encoder_pass.h"

/* Vectors that a head or a sequence would fill by half at most are left to the narrower ones. */
static int lanes(const Attention *a) {
    const int here = lanes_here();
    return here == 16 && (a->size <= 8 || a->length <= 8) ? 8 : here;
}

static void pass(const Attention *a, int backwards) {
    backwards ? CHOOSE(lanes(a), back, a) : CHOOSE(lanes(a), forth, a);
}

static void pass_layer(const Encoder *e, int backwards) {
    const int here = lanes(&e->attention);
    backwards ? CHOOSE(here, encode_back, e) : CHOOSE(here, encode, e);
}

/* Scratch for one head; NULL with an error set if there is no memory. */
static float *make_scratch(Attention *a) {
    const size_t size = (size_t)(a->size + MOST_LANES - 1) / MOST_LANES * MOST_LANES;
    const size_t length = (size_t)(a->length + MOST_LANES - 1) / MOST_LANES * MOST_LANES, block = 2 * MOST_LANES;
    float *scratch = calloc(4 * length * size + 5 * block * size + 2 * length * block + MOST_LANES, sizeof(float));
    if (!scratch) {
        PyErr_NoMemory();
        return NULL;
    }
    float *at = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
    float **of_length[] = {&a->keys, &a->values, &a->key_slopes, &a->value_slopes};
    float **of_block[] = {&a->queries, &a->query_slopes, &a->pulls, &a->queries_across, &a->pulls_across};
    for (int i = 0; i < 4; i++, at += length * size) *of_length[i] = at;
    for (int i = 0; i < 5; i++, at += block * size) *of_block[i] = at;
    a->shares = at, a->share_slopes = at + length * block;
    return scratch;
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
    if (!(scratch = make_scratch(&a))) goto done;
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

/* An encoder layer. Each array's sizes are told by letters: N samples of L tokens, E wide (T = 3 E), H heads, F hidden. */
static PyObject *run_layer(PyObject *args, int backwards) {
    enum { X, Y, FIRST, KEPT = FIRST + WEIGHTS, X_SLOPES = KEPT + 7, SLOPES, ALL = SLOPES + WEIGHTS };
    static const char *const shapes[ALL] = {
        "NLE", "NLE", "TE", "T", "EE", "E", "E", "E", "FE", "F", "EF", "E", "E", "E",
        "NLT", "NH2L", "NLE", "NLE", "NLE", "NLF", "2NL",
        "NLE", "TE", "T", "EE", "E", "E", "E", "FE", "F", "EF", "E", "E", "E"};
    const int wanted = backwards ? ALL : X_SLOPES;
    PyObject *arrays;
    Py_buffer view[ALL] = {0};
    float *at[ALL] = {0}, *own = NULL;
    long known[128];
    Encoder e = {0};
    Attention *a = &e.attention;
    if (!PyArg_ParseTuple(args, "fffO!", &a->scale, e.least, e.least + 1, &PyTuple_Type, &arrays)) return NULL;
    if (PyTuple_Size(arrays) != wanted) return PyErr_Format(PyExc_ValueError, "a layer has %d arrays", wanted);
    for (int i = 0; i < 128; i++) known[i] = -1;
    known['2'] = 2;
    for (int i = 0; i < wanted; i++) {
        const char *letters = shapes[i];
        const int dimensions = (int)strlen(letters);
        long sizes[4];
        for (int j = 0; j < dimensions; j++) sizes[j] = known[(int)letters[j]];
        const int writable = backwards ? i >= X_SLOPES : i == Y || i >= KEPT;
        at[i] = numbers(PyTuple_GetItem(arrays, i), view + i, "an array of the layer", writable, dimensions, sizes);
        if (!at[i]) goto done;
        for (int j = 0; j < dimensions; j++) known[(int)letters[j]] = view[i].shape[j];
        if (i == X) known['T'] = 3 * known['E'];
    }
    a->samples = known['N'], a->length = known['L'], a->heads = known['H'], e.width = known['E'], e.hidden = known['F'];
    if (a->heads < 1 || e.width < 1 || e.hidden < 1 || e.width % a->heads || e.width % 16 || e.hidden % 16 || a->length < 1 || a->length > LONGEST ||
        e.width > 1 << 15 || e.hidden > 1 << 17) {
        PyErr_SetString(PyExc_ValueError, "a layer must be 16, 32, ... wide, the same for each head");
        goto done;
    }
    a->size = e.width / a->heads;
    e.together = a->length < CHUNK ? CHUNK / a->length : 1;
    e.x = at[X], e.y = at[Y], e.gradient = at[Y], e.x_slopes = at[X_SLOPES];
    for (int i = 0; i < WEIGHTS; i++) {
        e.weight[i] = at[FIRST + i], e.weight_slopes[i] = at[SLOPES + i];
        if (backwards) memset(at[SLOPES + i], 0, (size_t)view[SLOPES + i].len);
    }
    e.packed = at[KEPT], a->scales = at[KEPT + 1], e.mixed = at[KEPT + 2], e.hat[0] = at[KEPT + 3];
    e.hat[1] = at[KEPT + 4], e.inner = at[KEPT + 5], e.spread = at[KEPT + 6];
    const size_t width = (size_t)e.width, hidden = (size_t)e.hidden, rows = (size_t)(e.together * a->length);
    const size_t needed = CHUNK * (3 * width + hidden) + (backwards ? 4 * rows * width : (4 * width + 2 * hidden) * width);
    if (!(own = make_scratch(a))) goto done;
    if (!(e.scratch = malloc(needed * sizeof(float)))) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    pass_layer(&e, backwards);
    Py_END_ALLOW_THREADS
done:
    free(own), free(e.scratch);
    for (int i = 0; i < ALL; i++)
        if (view[i].obj) PyBuffer_Release(&view[i]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *attention_encode(PyObject *self, PyObject *args) { return run_layer(args, 0); }

static PyObject *attention_encode_back(PyObject *self, PyObject *args) { return run_layer(args, 1); }

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
    {"encode", attention_encode, METH_VARARGS,
     "encode(scale, least, least, (x, y, *weights, *kept))\n\n"
     "Write to y what an encoder layer with these twelve weights makes of x, and to `kept` what `encode_back` needs."},
    {"encode_back", attention_encode_back, METH_VARARGS,
     "encode_back(scale, least, least, (x, gradient, *weights, *kept, x_slopes, *weight_slopes))\n\n"
     "Write the gradients of x and of the weights, given that of y."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_attention", "Attention of short sequences.", -1,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__attention(void) { return PyModule_Create(&definition); }
