/* Local training of a dense network: Linear, ReLU, ..., Linear with cross-entropy and SGD, one client a call.

   Python's lock is let go meanwhile, so that clients are trained in threads. The arithmetic is that of the plain path
   but for the order of sums, which depends on nothing but the processor's instruction set. */

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LAYERS 32
#define FILL 16 /* rows are filled up to a multiple of so many numbers, whatever the vector width */
#define ALWAYS static inline __attribute__((always_inline))

typedef struct {
    float lr, momentum, weight_decay, mu;
} Descent;

typedef enum { FORWARD, BACK, DESCEND } What;

/* A matrix. Weights lie in panels of so many columns, one after the other, so that a product reads them in a row:
   with stride 0 a panel's rows follow each other, and `panel` is how many there are. Otherwise it is a plain one. */
#define PANEL 64

typedef struct {
    float *at;
    long columns, panel, stride;
} Matrix;

ALWAYS long stride_at(const Matrix *m, long column) {
    const long left = m->columns - column / PANEL * PANEL;
    return m->stride ? m->stride : left < PANEL ? left : PANEL;
}

ALWAYS float *place(const Matrix *m, long row, long column) {
    return m->at + column / PANEL * PANEL * m->panel + row * stride_at(m, column) + column % PANEL;
}

static Matrix plain(float *at, long columns, long stride) { return (Matrix){at, columns, 1, stride}; }

static Matrix panels(float *at, long rows, long columns) { return (Matrix){at, columns, rows, 0}; }

typedef struct { /* C = A B, and what is done with it */
    What what;
    long rows, inner;
    const float *a;
    long a_down, a_along;
    Matrix b, c;
    int rectify;                                   /* FORWARD: ReLU */
    const float *active;                           /* BACK: the layer's outputs, and what dropout scaled them by */
    long active_stride;
    float scale;
    const Descent *descent;                        /* DESCEND */
    const float *origin;
    float *moment;
} Product;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CHOICES 1
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#define ROWS 6
#define WIDE 4
#include "dense_step.h"
#undef NAME
#undef LANES
#undef ROWS
#undef WIDE
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME(x) x##_avx2
#define LANES 8
#define ROWS 6
#define WIDE 2
#include "dense_step.h"
#undef NAME
#undef LANES
#undef ROWS
#undef WIDE
#pragma GCC pop_options
#endif

#define NAME(x) x##_any
#define LANES 4
#define ROWS 6
#define WIDE 2
#include "dense_step.h"

typedef void (*Multiply)(const Product *);

static Multiply multiply_here(const char **name) {
#ifdef CHOICES
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512bw")) {
        *name = "avx512";
        return product_avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        *name = "avx2";
        return product_avx2;
    }
#endif
    *name = "any";
    return product_any;
}

typedef struct { /* what one layer works with */
    long in, out, in_fill, out_fill, rows; /* rows: inputs, and one more if there is a bias */
    Matrix weights, turned;
    float *origin, *moment;
    float *outputs, *errors; /* a row a sample, of out_fill + FILL numbers */
    float *theirs, *their_bias;
    const float *mask; /* which of its inputs dropout leaves, a row a sample, or NULL */
    float scale;       /* what those are multiplied by */
} Layer;

typedef struct {
    int layers;
    Layer layer[MOST_LAYERS];
    const float *x;
    const int64_t *y, *rows, *lengths;
    long steps, longest;
    Descent descent;
    uint8_t *squared; /* or NULL */
    PyObject *draw;   /* fills the masks of a step, or NULL */
    PyThreadState *thread;
    double loss;
    int64_t right;
    int bad_label, too_large, raised;
} Work;

static long filled(long n) { return (n + FILL - 1) / FILL * FILL; }

/* B = A' for `rows` rows and `columns` columns of A, tile by tile. */
static void turn(const Matrix *a, const Matrix *b, long rows, long columns) {
    for (long j = 0; j < columns; j += FILL)
        for (long i = 0; i < rows; i += FILL) {
            const float *from = place(a, i, j);
            float *to = place(b, j, i);
            const long down = stride_at(a, j), across = stride_at(b, i);
            if (i + FILL <= rows && j + FILL <= columns) {
                for (int c = 0; c < FILL; c++)
                    for (int r = 0; r < FILL; r++) to[c * across + r] = from[r * down + c];
                continue;
            }
            for (long c = 0; c < FILL && j + c < columns; c++)
                for (long r = 0; r < FILL && i + r < rows; r++) to[c * across + r] = from[r * down + c];
        }
}

static void pack(Layer *l) {
    const Matrix theirs = plain(l->theirs, l->in, l->in);
    turn(&theirs, &l->weights, l->out, l->in);
    for (long o = 0; l->their_bias && o < l->out; o++) *place(&l->weights, l->in, o) = l->their_bias[o];
    if (l->origin) memcpy(l->origin, l->weights.at, l->rows * l->out_fill * sizeof(float));
}

static void unpack(Layer *l) {
    const Matrix theirs = plain(l->theirs, l->in, l->in);
    turn(&l->weights, &theirs, l->in, l->out);
    for (long o = 0; l->their_bias && o < l->out; o++) l->their_bias[o] = *place(&l->weights, l->in, o);
}

/* Softmax, loss and errors of the outputs: (p - [c = y]) / batch. */
static int judge(Work *w, const int64_t *y, long batch, uint8_t *squared) {
    Layer *last = &w->layer[w->layers - 1];
    for (long s = 0; s < batch; s++) {
        const float *out = last->outputs + s * (last->out_fill + FILL);
        float *error = last->errors + s * (last->out_fill + FILL), most = out[0], sum = 0;
        long found = 0;
        if (y[s] < 0 || y[s] >= last->out) return w->bad_label = 1;
        for (long c = 1; c < last->out; c++)
            if (out[c] > most) most = out[c], found = c;
        for (long c = 0; c < last->out; c++) sum += error[c] = expf(out[c] - most);
        w->loss += logf(sum) + most - out[y[s]];
        for (long c = 0; c < last->out; c++) error[c] = (error[c] / sum - (c == y[s])) / batch;
        w->right += found == y[s];
        if (squared) {
            int64_t distance = (found - y[s]) * (found - y[s]);
            if (distance > 255) w->too_large = 1;
            squared[s] = (uint8_t)distance;
        }
    }
    return 0;
}

/* Have Python draw the masks of a step. */
static int draw_masks(Work *w, long batch) {
    PyEval_RestoreThread(w->thread);
    PyObject *drawn = PyObject_CallFunction(w->draw, "l", batch);
    w->raised = drawn == NULL;
    Py_XDECREF(drawn);
    w->thread = PyEval_SaveThread();
    return w->raised;
}

/* Dropout of a layer's inputs. */
static void drop(const Layer *l, float *in, long stride, long batch) {
    for (long s = 0; s < batch; s++)
        for (long i = 0; i < l->in; i++) in[s * stride + i] *= l->mask[s * l->in + i] * l->scale;
}

static void train(Work *w, float *input, Multiply multiply) {
    Layer *first = w->layer;
    const long width = first->in, input_stride = first->in_fill + FILL;
    const int64_t *rows = w->rows;
    for (long step = 0; step < w->steps; rows += w->lengths[step++]) {
        const long batch = w->lengths[step];
        int64_t y[batch];
        if (w->draw && draw_masks(w, batch)) return;
        for (long s = 0; s < batch; s++) {
            memcpy(input + s * input_stride, w->x + rows[s] * width, width * sizeof(float));
            input[s * input_stride + width] = 1;
            y[s] = w->y[rows[s]];
        }
        if (step + 1 < w->steps) /* samples lie all over the storage: fetch the next ones while these are worked on */
            for (long s = 0; s < w->lengths[step + 1]; s++)
                for (long i = 0; i < width; i += 16) __builtin_prefetch(w->x + rows[batch + s] * width + i);
        float *in = input;
        long in_stride = input_stride;
        for (int l = 0; l < w->layers; l++) {
            Layer *a = &w->layer[l];
            if (a->mask) drop(a, in, in_stride, batch);
            Product p = {.what = FORWARD, .rows = batch, .inner = a->rows, .a = in, .a_down = in_stride, .a_along = 1,
                         .b = a->weights, .c = plain(a->outputs, a->out_fill, a->out_fill + FILL),
                         .rectify = l + 1 < w->layers};
            multiply(&p);
            in = a->outputs, in_stride = a->out_fill + FILL;
            for (long s = 0; s < batch; s++) a->outputs[s * in_stride + a->out] = 1; /* the next layer's bias */
        }
        if (judge(w, y, batch, w->squared ? w->squared + (rows - w->rows) : NULL)) return;
        for (int l = w->layers - 1; l >= 0; l--) {
            Layer *a = &w->layer[l], *below = a - 1;
            if (l) {
                turn(&a->weights, &a->turned, a->in, a->out);
                Product p = {.what = BACK, .rows = batch, .inner = a->out, .a = a->errors, .a_down = a->out_fill + FILL,
                             .a_along = 1, .b = a->turned, .c = plain(below->errors, a->in_fill, a->in_fill + FILL),
                             .active = below->outputs, .active_stride = a->in_fill + FILL,
                             .scale = a->mask ? a->scale : 1};
                multiply(&p);
            }
            Product p = {.what = DESCEND, .rows = a->rows, .inner = batch, .a = l ? below->outputs : input, .a_down = 1,
                         .a_along = l ? below->out_fill + FILL : input_stride,
                         .b = plain(a->errors, a->out_fill, a->out_fill + FILL), .c = a->weights,
                         .descent = &w->descent, .origin = a->origin, .moment = a->moment};
            multiply(&p);
        }
    }
}

/* All the memory a client needs, in one piece that begins with zeros; returns it, or NULL. */
static float *lay_out(Work *w, float **input) {
    size_t need = (size_t)w->longest * (w->layer[0].in_fill + FILL) + FILL;
    for (int l = 0; l < w->layers; l++) {
        const Layer *a = &w->layer[l];
        need += 3 * (size_t)a->rows * a->out_fill + (size_t)a->out * a->in_fill;
        need += (size_t)w->longest * 2 * (a->out_fill + FILL);
    }
    float *memory = calloc(need, sizeof(float));
    if (!memory) return NULL;
    float *at = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    *input = at, at += w->longest * (w->layer[0].in_fill + FILL);
    for (int l = 0; l < w->layers; l++) {
        Layer *a = &w->layer[l];
        a->weights = panels(at, a->rows, a->out_fill), at += a->rows * a->out_fill;
        if (w->descent.mu != 0) a->origin = at, at += a->rows * a->out_fill;
        if (w->descent.momentum != 0) a->moment = at, at += a->rows * a->out_fill;
        if (l) a->turned = panels(at, a->out, a->in_fill), at += a->out * a->in_fill;
        a->outputs = at, at += w->longest * (a->out_fill + FILL);
        a->errors = at, at += w->longest * (a->out_fill + FILL);
    }
    return memory;
}

/* The rest is how Python calls it. */

#define MOST_BUFFERS (3 * MOST_LAYERS + 8)

typedef struct {
    Py_buffer view[MOST_BUFFERS];
    int held;
} Buffers;

/* The numbers behind an object, which must be contiguous, of this type and at least so many; NULL with an error. */
static void *borrow(Buffers *b, PyObject *from, const char *what, char kind, Py_ssize_t size, int writable,
                    Py_ssize_t at_least) {
    Py_buffer *view = &b->view[b->held];
    if (PyObject_GetBuffer(from, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0))) return NULL;
    b->held++;
    char has = view->format ? view->format[0] : 'B';
    int same = has == kind || (kind == 'l' && has == 'q');
    if (!same || view->itemsize != size || view->len < at_least * size) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes of type %c are not the %zd numbers of type %c wanted", what,
                     view->len, has, at_least, kind);
        return NULL;
    }
    return view->buf;
}

static int take_layers(Work *w, Buffers *b, PyObject *arrays) {
    Py_ssize_t count = PyList_Size(arrays);
    if (count < 2 || count % 2 || count / 2 > MOST_LAYERS) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "a weight and a bias, or None, are wanted a layer");
        return -1;
    }
    w->layers = (int)(count / 2);
    for (int l = 0; l < w->layers; l++) {
        Layer *a = &w->layer[l];
        PyObject *bias = PyList_GetItem(arrays, 2 * l + 1);
        if (!(a->theirs = borrow(b, PyList_GetItem(arrays, 2 * l), "a weight", 'f', 4, 1, 1))) return -1;
        const Py_buffer *view = &b->view[b->held - 1];
        if (view->ndim != 2) {
            PyErr_SetString(PyExc_ValueError, "a weight must have two dimensions");
            return -1;
        }
        a->out = view->shape[0], a->in = view->shape[1];
        a->out_fill = filled(a->out), a->in_fill = filled(a->in);
        a->rows = a->in + (bias != Py_None);
        if (a->out < 1 || a->in < 1 || (l && a->in != a[-1].out)) {
            PyErr_SetString(PyExc_ValueError, "the layers do not follow each other");
            return -1;
        }
        if (bias != Py_None && !(a->their_bias = borrow(b, bias, "a bias", 'f', 4, 1, a->out))) return -1;
    }
    return 0;
}

static int take_samples(Work *w, Buffers *b, PyObject *x, PyObject *y, PyObject *rows, PyObject *lengths,
                        PyObject *squared) {
    if (!(w->x = borrow(b, x, "x", 'f', 4, 0, 0))) return -1;
    const Py_ssize_t samples = b->view[b->held - 1].len / 4 / w->layer[0].in;
    if (!(w->y = borrow(b, y, "y", 'l', 8, 0, samples))) return -1;
    if (!(w->lengths = borrow(b, lengths, "lengths", 'l', 8, 0, 0))) return -1;
    w->steps = b->view[b->held - 1].len / 8;
    int64_t total = 0;
    for (long step = 0; step < w->steps; step++) {
        const int64_t length = w->lengths[step];
        if (length < 1 || length > 1 << 20 || total > INT64_MAX / 2) {
            PyErr_SetString(PyExc_ValueError, "a batch has no samples, or too many");
            return -1;
        }
        total += length;
        if (length > w->longest) w->longest = length;
    }
    if (!(w->rows = borrow(b, rows, "rows", 'l', 8, 0, total))) return -1;
    for (int64_t i = 0; i < total; i++)
        if (w->rows[i] < 0 || w->rows[i] >= samples) {
            PyErr_SetString(PyExc_IndexError, "a row lies beyond the samples");
            return -1;
        }
    return squared == Py_None || (w->squared = borrow(b, squared, "squared errors", 'B', 1, 1, total)) ? 0 : -1;
}

/* For each layer None, or the mask of its inputs and what they are multiplied by where it is 1. */
static int take_masks(Work *w, Buffers *b, PyObject *masks) {
    if (!w->draw) return 0;
    if (!PyList_Check(masks) || PyList_Size(masks) != w->layers || !PyCallable_Check(w->draw)) {
        PyErr_SetString(PyExc_ValueError, "a mask, or None, is wanted a layer, and what draws them");
        return -1;
    }
    for (int l = 0; l < w->layers; l++) {
        Layer *a = &w->layer[l];
        PyObject *item = PyList_GetItem(masks, l), *mask;
        if (item == Py_None) continue;
        if (!PyArg_ParseTuple(item, "Of", &mask, &a->scale)) return -1;
        if (!(a->mask = borrow(b, mask, "a mask", 'f', 4, 0, w->longest * a->in))) return -1;
    }
    return 0;
}

static PyObject *dense_train(PyObject *self, PyObject *args) {
    PyObject *arrays, *x, *y, *rows, *lengths, *squared, *masks, *draw;
    Work w = {0};
    Buffers b;
    b.held = 0;
    if (!PyArg_ParseTuple(args, "O!OOOOffffOOO", &PyList_Type, &arrays, &x, &y, &rows, &lengths, &w.descent.lr,
                          &w.descent.momentum, &w.descent.weight_decay, &w.descent.mu, &squared, &masks,
                          &draw))
        return NULL;
    w.draw = draw == Py_None ? NULL : draw;
    PyObject *result = NULL;
    float *input, *memory;
    const char *name;
    if (take_layers(&w, &b, arrays) || take_samples(&w, &b, x, y, rows, lengths, squared) || take_masks(&w, &b, masks))
        goto done;
    w.thread = PyEval_SaveThread();
    memory = lay_out(&w, &input);
    if (memory) {
        for (int l = 0; l < w.layers; l++) pack(&w.layer[l]);
        train(&w, input, multiply_here(&name));
        for (int l = 0; l < w.layers; l++) unpack(&w.layer[l]);
        free(memory);
    }
    PyEval_RestoreThread(w.thread);
    if (!memory)
        PyErr_NoMemory();
    else if (!w.raised && (w.bad_label || w.too_large))
        PyErr_SetString(PyExc_ValueError, w.bad_label ? "a label is no class" : "squared errors do not fit a byte");
    else if (!w.raised)
        result = Py_BuildValue("dL", w.loss, (long long)w.right);
done:
    while (b.held) PyBuffer_Release(&b.view[--b.held]);
    return result;
}

static PyMethodDef methods[] = {
    {"train", dense_train, METH_VARARGS,
     "train(arrays, x, y, rows, lengths, lr, momentum, weight_decay, mu, squared, masks, draw) -> (loss, right)\n\n"
     "Train in place the weights and biases in `arrays`, batch by batch; the summed loss and hits before each step.\n\n"
     "With dropout `draw(length)` fills the masks before each step; `masks` has None or (mask, scale) a layer."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_dense", "Training of small dense networks.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__dense(void) {
    PyObject *module = PyModule_Create(&definition);
    const char *name;
    multiply_here(&name);
    if (module && PyModule_AddStringConstant(module, "instructions", name)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
