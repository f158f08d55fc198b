/* An LSTM layer through time, forth and back.

   Each step is one product, of its inputs and of the state before it with the weights, whose gates are bent while they
   are in the cache. Back, each step turns the slopes of what came out into those of its gates and hands the rest to the
   step before; a few steps' worth go into the slopes of the weights together. What comes out for a sample does not
   depend on the others of its batch. Hochreiter and Schmidhuber, Long short-term memory, 1997. Python's lock is let go
   meanwhile. */

#include "kernel.h"

#define ROWS 6 /* of a matrix that are multiplied together */
#define WIDE 4 /* vectors of a row that are */
#define GATES 4
#define BLOCK 128 /* samples' steps that go into the weights' slopes together */
#define FILL 16   /* a strip may be filled up by so many columns */

typedef struct { /* the left side of a product: element (i, k) is a[i * down + k * along] */
    const float *a;
    long down, along, depth;
} Left;

typedef struct {
    long steps, batch, features, units;
    const float *x;               /* steps x batch x features */
    const float *w_in, *w;        /* gates x features, gates x units */
    const float *bias;            /* gates, or NULL */
    const float *h0, *c0;         /* batch x units: the state before the first step, or NULL */
    float *gates;                 /* steps x batch x gates: in, forget, new and out */
    float *h, *c;                 /* steps x batch x units */
    const float *h_slopes;        /* the gradient of h, or NULL */
    const float *c_slopes;        /* the gradient of the last c, or NULL */
    float *x_slopes;              /* the other gradients; NULL: not asked for */
    float *w_in_slopes, *w_slopes, *bias_slopes;
    float *h0_slopes, *c0_slopes; /* batch x units */
    int whole;                    /* whether the gradient of h0 is asked for */
    long together;                /* steps whose gates' slopes are kept until they go into the weights' */
    float *packed;                /* the weights, strip by strip */
    float *bend;                  /* for each gate, how it is bent: 1/2 by the sigmoid, 1 by tanh */
    float *errors;                /* together x batch x gates: the gates' slopes */
    float *spare;                 /* batch x units */
    float *x_sums, *h_sums;       /* the weights' slopes, transposed */
    float *block;                 /* of errors, packed */
} Recurrence;

#ifdef CHOICES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#include "recurrent_pass.h"
#undef NAME
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#undef WIDE
#define WIDE 2
#define NAME(x) x##_avx2
#define LANES 8
#include "recurrent_pass.h"
#undef NAME
#undef LANES
#pragma GCC pop_options
#endif
#undef WIDE
#define WIDE 2
#define NAME(x) x##_any
#define LANES 4
#include "recurrent_pass.h"

static void pass(const Recurrence *r, int backwards) {
    const int lanes = lanes_here();
    backwards ? CHOOSE(lanes, back, r) : CHOOSE(lanes, forth, r);
}

static PyObject *run(PyObject *args, int backwards) {
    enum { X, W_IN, W, BIAS, H0, C0, GATING, H, C, H_SLOPES, C_SLOPES, X_SLOPES, W_IN_SLOPES, W_SLOPES, H0_SLOPES,
           C0_SLOPES, ALL };
    PyObject *given[ALL] = {0};
    Py_buffer view[ALL] = {0};
    Recurrence r = {0};
    float *scratch = NULL;
    if (!PyArg_ParseTuple(args, backwards ? "OOOOOOOOOOOOOOOOp" : "OOOOOOOOO", given, given + 1, given + 2, given + 3,
                          given + 4, given + 5, given + 6, given + 7, given + 8, given + 9, given + 10, given + 11,
                          given + 12, given + 13, given + 14, given + 15, &r.whole))
        return NULL;
    if (!(r.x = numbers(given[X], view + X, "the inputs", 0, 3, (long[]){-1, -1, -1}))) goto done;
    if (!(r.w = numbers(given[W], view + W, "the weights", 0, 2, (long[]){-1, -1}))) goto done;
    r.steps = view[X].shape[0], r.batch = view[X].shape[1], r.features = view[X].shape[2], r.units = view[W].shape[1];
    if (r.steps < 1 || r.batch < 1 || r.features < 1 || r.units < FILL ||
        view[W].shape[0] != GATES * r.units) {
        PyErr_Format(PyExc_ValueError, "there must be a step, a sample, a feature, %d units, and %d gates for each", FILL, GATES);
        goto done;
    }
    const long gates = GATES * r.units, here[] = {r.steps, r.batch, r.features}, all[] = {r.steps, r.batch, r.units};
    const long wide[] = {r.steps, r.batch, gates}, state[] = {r.batch, r.units}, square[] = {gates, r.units};
    const long across[] = {gates, r.features};
#define TAKE(field, which, name, writable, dimensions, sizes) \
    if (!(r.field = numbers(given[which], view + which, name, writable, dimensions, sizes))) goto done
#define MAY(field, which, name, writable, dimensions, sizes) \
    if (given[which] != Py_None) TAKE(field, which, name, writable, dimensions, sizes)
    TAKE(w_in, W_IN, "the weights of the inputs", 0, 2, across);
    MAY(h0, H0, "the first state", 0, 2, state);
    MAY(c0, C0, "the first cell", 0, 2, state);
    TAKE(gates, GATING, "the gates", !backwards, 3, wide);
    TAKE(h, H, "the states", !backwards, 3, all);
    TAKE(c, C, "the cells", !backwards, 3, all);
    if (backwards) {
        TAKE(bias_slopes, BIAS, "the slopes of the bias", 1, 1, &gates);
        MAY(h_slopes, H_SLOPES, "the slopes of the states", 0, 3, all);
        MAY(c_slopes, C_SLOPES, "the slopes of the last cell", 0, 2, state);
        MAY(x_slopes, X_SLOPES, "the slopes of the inputs", 1, 3, here);
        TAKE(w_in_slopes, W_IN_SLOPES, "the slopes of the inputs' weights", 1, 2, across);
        TAKE(w_slopes, W_SLOPES, "the slopes of the weights", 1, 2, square);
        TAKE(h0_slopes, H0_SLOPES, "the slopes of the first state", 1, 2, state);
        TAKE(c0_slopes, C0_SLOPES, "the slopes of the first cell", 1, 2, state);
    } else
        MAY(bias, BIAS, "the bias", 0, 1, &gates);
    r.together = r.batch < BLOCK ? BLOCK / r.batch : 1;
    if (r.together > r.steps) r.together = r.steps;
    const size_t weights = (size_t)(gates + FILL) * (size_t)(r.features + r.units + 2 * FILL);
    const size_t errors = (size_t)(r.together * r.batch * gates), block = BLOCK * 4 * FILL;
    const size_t needed = backwards ? 2 * weights + errors + block + (size_t)(r.batch * r.units) : weights + (size_t)gates;
    if (!(scratch = malloc(needed * sizeof(float) + 64))) {
        PyErr_NoMemory();
        goto done;
    }
    r.packed = (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    r.bend = r.packed + weights; /* only forth */
    for (long i = 0; !backwards && i < gates; i++) r.bend[i] = i / r.units == 2 ? 1 : 0.5f;
    if (backwards) {
        r.x_sums = r.packed + weights, r.h_sums = r.x_sums + gates * r.features;
        memset(r.x_sums, 0, (size_t)(gates * (r.features + r.units)) * sizeof(float));
        memset(r.bias_slopes, 0, (size_t)gates * sizeof(float));
        r.block = r.packed + 2 * weights, r.errors = r.block + block, r.spare = r.errors + errors;
    }
    Py_BEGIN_ALLOW_THREADS
    pass(&r, backwards);
    Py_END_ALLOW_THREADS
done:
    free(scratch);
    for (int i = 0; i < ALL; i++)
        if (view[i].obj) PyBuffer_Release(&view[i]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *recurrent_forth(PyObject *self, PyObject *args) { return run(args, 0); }

static PyObject *recurrent_back(PyObject *self, PyObject *args) { return run(args, 1); }

static PyMethodDef methods[] = {
    {"forth", recurrent_forth, METH_VARARGS,
     "forth(x, w_in, w, bias, h0, c0, gates, h, c)\n\n"
     "Write the gates (steps x batch x 4 units), states and cells (steps x batch x units) that x (steps x batch x "
     "features) leads to; bias, h0 and c0 may be None."},
    {"back", recurrent_back, METH_VARARGS,
     "back(x, w_in, w, bias_slopes, h0, c0, gates, h, c, h_slopes, c_slopes, x_slopes, w_in_slopes, w_slopes, h0_slopes, "
     "c0_slopes, whole)\n\n"
     "Write the gradients of the weights, of x (None leaves it out), h0 (if whole) and c0, given those of all states and "
     "of the last cell (None is zero)."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_recurrent", "The steps of recurrent layers.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__recurrent(void) { return PyModule_Create(&definition); }
