/* Convolutions of 3 x 3 or 5 x 5 by Winograd's algorithm, forth and back, for pictures whose channels lie side by side.

   The picture is cut into overlapping tiles of 6 x 6. In the right basis a convolution of a tile multiplies it by the
   kernel place by place, so that over all channels there are 36 matrix products, which make 4 x 4 numbers of what comes
   out (with 3 x 3 kernels) or 2 x 2 (with 5 x 5): a quarter of the multiplications, or two fifths. Tiles go through in
   blocks that stay in the cache of a core. Lavin and Gray, Fast algorithms for convolutional neural networks, 2016.
   Python's lock is let go meanwhile. */

#include "kernel.h"

#define POINTS 36
#define BLOCK 32 /* tiles that go through together */
#define ROWS 4   /* of a matrix that are multiplied together */
#define APART 16 /* numbers between the matrices of two points, lest all fall on the same lines of the cache */

typedef struct {
    long pictures, height, width, in, out, side, padding;
    long down, across;       /* the size of what comes out */
    long tiles_down, tiles_across;
    const float *x;          /* pictures x height x width x in */
    const float *weight;     /* side x side x in x out; to go back, side x side x out x in */
    const float *bias;       /* out */
    float *y;                /* pictures x down x across x out */
    const float *gradient;   /* of y */
    float *x_slopes;         /* the gradient of x, or NULL */
    float *weight_slopes, *bias_slopes; /* side x side x in x out; out */
    float *kernels, *kernel_slopes, *ins, *outs; /* in the basis of the tiles: POINTS matrices each */
    float *nothing, *nowhere; /* what lies outside of a picture is read from here, and written there */
} Conv;

/* Sets where the size x size numbers of a tile lie in the picture, `outside` for those that lie out of it. */
INLINE void places(const int size, float *picture, float *outside, long height, long width, long channels, long y,
                   long x, float **place) {
    for (int i = 0; i < size; i++)
        for (int j = 0; j < size; j++) {
            const int within = y + i >= 0 && y + i < height && x + j >= 0 && x + j < width;
            place[i * size + j] = within ? picture + ((y + i) * width + x + j) * channels : outside;
        }
}

#ifdef CHOICES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#define WIDE 4
#include "winograd_pass.h"
#undef NAME
#undef LANES
#undef WIDE
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME(x) x##_avx2
#define LANES 8
#define WIDE 2
#include "winograd_pass.h"
#undef NAME
#undef LANES
#undef WIDE
#pragma GCC pop_options
#endif
#define NAME(x) x##_any
#define LANES 4
#define WIDE 2
#include "winograd_pass.h"

static void pass(const Conv *c, int backwards) {
    const int lanes = lanes_here();
    backwards ? CHOOSE(lanes, back, c) : CHOOSE(lanes, forth, c);
}

static PyObject *run(PyObject *args, int backwards) {
    enum { X, WEIGHT, BIAS, Y, X_SLOPES, WEIGHT_SLOPES, ALL };
    PyObject *given[ALL] = {0};
    Py_buffer view[ALL] = {0};
    Conv c = {0};
    if (!(backwards ? PyArg_ParseTuple(args, "OOOOOOl", given + X, given + WEIGHT, given + Y, given + X_SLOPES,
                                       given + WEIGHT_SLOPES, given + BIAS, &c.padding)
                    : PyArg_ParseTuple(args, "OOOOl", given + X, given + WEIGHT, given + BIAS, given + Y, &c.padding)))
        return NULL;
    float *scratch = NULL;
    if (!(c.x = numbers(given[X], view + X, "the pictures", 0, 4, (long[]){-1, -1, -1, -1}))) goto done;
    c.pictures = view[X].shape[0], c.height = view[X].shape[1], c.width = view[X].shape[2], c.in = view[X].shape[3];
    const int ins = backwards ? 3 : 2;
    if (!(c.weight = numbers(given[WEIGHT], view + WEIGHT, "the weights", 0, 4, (long[]){-1, -1, -1, -1}))) goto done;
    c.side = view[WEIGHT].shape[0], c.out = view[WEIGHT].shape[5 - ins];
    if (view[WEIGHT].shape[1] != c.side || (c.side != 3 && c.side != 5) || view[WEIGHT].shape[ins] != c.in ||
        c.in < 16 || c.out < 16 || c.in % 16 || c.out % 16 || c.padding < 0 || c.padding >= c.side) {
        PyErr_SetString(PyExc_ValueError, "a kernel must be 3 x 3 or 5 x 5, padding smaller than it, channels 16, 32, ...");
        goto done;
    }
    c.down = c.height + 2 * c.padding - c.side + 1, c.across = c.width + 2 * c.padding - c.side + 1;
    if (c.down < 1 || c.across < 1) {
        PyErr_SetString(PyExc_ValueError, "the pictures are smaller than the kernel");
        goto done;
    }
    const long outs[] = {c.pictures, c.down, c.across, c.out}, x_sizes[] = {c.pictures, c.height, c.width, c.in};
    if (!(c.y = numbers(given[Y], view + Y, "what comes out", !backwards, 4, outs))) goto done;
    c.gradient = c.y;
    if (!(c.bias_slopes = numbers(given[BIAS], view + BIAS, "the bias", backwards, 1, &c.out))) goto done;
    c.bias = c.bias_slopes;
    if (backwards) {
        const long weight_sizes[] = {c.side, c.side, c.in, c.out};
        if (given[X_SLOPES] != Py_None &&
            !(c.x_slopes = numbers(given[X_SLOPES], view + X_SLOPES, "the slopes of the pictures", 1, 4, x_sizes)))
            goto done;
        if (!(c.weight_slopes = numbers(given[WEIGHT_SLOPES], view + WEIGHT_SLOPES, "the slopes of the weights", 1, 4,
                                        weight_sizes)))
            goto done;
    }
    const long step = 7 - c.side, most = c.in > c.out ? c.in : c.out;
    c.tiles_down = (c.down + step - 1) / step, c.tiles_across = (c.across + step - 1) / step;
    const size_t kernels = POINTS * (size_t)(c.in * c.out + APART), block = POINTS * (size_t)(BLOCK * most + APART);
    if (!(scratch = malloc((2 * kernels + 2 * block + 2 * (size_t)most) * sizeof(float) + 64))) {
        PyErr_NoMemory();
        goto done;
    }
    c.kernels = (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    c.kernel_slopes = c.kernels + kernels, c.ins = c.kernel_slopes + kernels, c.outs = c.ins + block;
    c.nothing = c.outs + block, c.nowhere = c.nothing + most;
    memset(c.ins, 0, (2 * block + 2 * (size_t)most) * sizeof(float));
    Py_BEGIN_ALLOW_THREADS
    pass(&c, backwards);
    Py_END_ALLOW_THREADS
done:
    free(scratch);
    for (int i = 0; i < ALL; i++)
        if (view[i].obj) PyBuffer_Release(&view[i]);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static PyObject *winograd_forth(PyObject *self, PyObject *args) { return run(args, 0); }

static PyObject *winograd_back(PyObject *self, PyObject *args) { return run(args, 1); }

static PyMethodDef methods[] = {
    {"forth", winograd_forth, METH_VARARGS,
     "forth(x, weight, bias, y, padding)\n\n"
     "Write the convolution of x (N x H x W x in) with weight (side x side x in x out) plus bias to y (N x H x W x out)."},
    {"back", winograd_back, METH_VARARGS,
     "back(x, weight, gradient, x_slopes, weight_slopes, bias_slopes, padding)\n\n"
     "Write the gradients of x (None leaves it out), weight and bias, given that of y; weight is side x side x out x in, "
     "weight_slopes side x side x in x out."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_winograd", "Convolutions by Winograd's algorithm.", -1,
                                        methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__winograd(void) { return PyModule_Create(&definition); }
