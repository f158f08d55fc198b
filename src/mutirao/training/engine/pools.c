/* Max-pooling with the ReLU behind it, for pictures whose channels lie side by side (channels_last), forth and back.

   torch does this in four passes over memory with indices of eight bytes; here it is one pass each way with indices of
   one byte. Values, gradients and the order of their sums are torch's. Python's lock is let go meanwhile. */

#include "kernel.h"

typedef struct {
    long pictures, height, width, channels, side, stride;
    long down, across; /* the size of what comes out */
    float *in, *out;   /* pictures x height x width x channels, or their gradient; the same of what comes out */
    const float *gradient;
    uint8_t *where; /* which place of its window each number that comes out was found at */
} Pool;

#ifdef CHOICES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#include "pools_pass.h"
#undef NAME
#undef LANES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2")
#define NAME(x) x##_avx2
#define LANES 8
#include "pools_pass.h"
#undef NAME
#undef LANES
#pragma GCC pop_options
#endif
#define NAME(x) x##_any
#define LANES 4
#include "pools_pass.h"

static void pass(const Pool *p, int backwards) {
    const int lanes = lanes_here();
    backwards ? CHOOSE(lanes, back, p) : CHOOSE(lanes, forth, p);
}

static PyObject *run(PyObject *args, int backwards) {
    PyObject *given[4];
    Py_buffer view[4];
    Pool p = {0};
    const char *name[] = {"the pictures", "what comes out", "the places", "the gradient"};
    if (!(backwards ? PyArg_ParseTuple(args, "OOOOll", given, given + 1, given + 2, given + 3, &p.side, &p.stride)
                    : PyArg_ParseTuple(args, "OOOll", given, given + 1, given + 2, &p.side, &p.stride)))
        return NULL;
    const int wanted = backwards ? 4 : 3;
    int held = 0;
    for (; held < wanted; held++) {
        const int bytes = held == 2, writable = backwards ? held == 0 : held > 0;
        Py_buffer *v = &view[held];
        if (PyObject_GetBuffer(given[held], v, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)))
            goto done;
        if (v->ndim != 4 || !v->format || v->format[0] != (bytes ? 'B' : 'f')) {
            PyErr_Format(PyExc_ValueError, "%s must have four dimensions and type %s", name[held], bytes ? "B" : "f");
            held++;
            goto done;
        }
    }
    p.pictures = view[0].shape[0], p.height = view[0].shape[1], p.width = view[0].shape[2];
    p.channels = view[0].shape[3];
    if (p.side < 1 || p.side > 15 || p.stride < 1 || p.stride > 1 << 20 || p.side > p.height || p.side > p.width) {
        PyErr_SetString(PyExc_ValueError, "a window must fit into the pictures and have at most 15 x 15 places");
        goto done;
    }
    p.down = (p.height - p.side) / p.stride + 1, p.across = (p.width - p.side) / p.stride + 1;
    for (int i = 1; i < wanted; i++) {
        const Py_ssize_t *shape = view[i].shape;
        if (shape[0] != p.pictures || shape[1] != p.down || shape[2] != p.across || shape[3] != p.channels) {
            PyErr_Format(PyExc_ValueError, "%s must be %ld x %ld x %ld x %ld", name[i], p.pictures, p.down, p.across,
                         p.channels);
            goto done;
        }
    }
    p.in = view[0].buf, p.out = view[1].buf, p.where = view[2].buf, p.gradient = backwards ? view[3].buf : NULL;
    uint8_t furthest = 0;
    for (Py_ssize_t i = 0; backwards && i < view[2].len; i++) furthest = p.where[i] > furthest ? p.where[i] : furthest;
    if (furthest >= p.side * p.side) {
        PyErr_SetString(PyExc_IndexError, "a place lies outside its window");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    pass(&p, backwards);
    Py_END_ALLOW_THREADS
done:
    while (held) PyBuffer_Release(&view[--held]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *pools_forth(PyObject *self, PyObject *args) { return run(args, 0); }

static PyObject *pools_back(PyObject *self, PyObject *args) { return run(args, 1); }

static PyMethodDef methods[] = {
    {"forth", pools_forth, METH_VARARGS,
     "forth(x, out, where, side, stride)\n\n"
     "Write ReLU(max-pool(x)) to `out` and the place of each maximum in its window to `where`; all N x H x W x C."},
    {"back", pools_back, METH_VARARGS,
     "back(slopes, out, where, gradient, side, stride)\n\n"
     "Write to `slopes` the gradient of x, given that of `out`."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_pools", "Max-pooling and ReLU in one.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__pools(void) { return PyModule_Create(&definition); }
