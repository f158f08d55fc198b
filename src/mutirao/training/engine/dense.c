/* Local training of a dense network: Linear, ReLU, ..., Linear with cross-entropy and SGD, one client a call.

   Python's lock is let go meanwhile, so that clients are trained in threads. The arithmetic is that of the plain path
   but for the order of sums, which depends on nothing but the processor's instruction set. */

#include <math.h>
#include "kernel.h"

#include "dense_train.h"

#define MOST_BUFFERS (7 * MOST_LAYERS + 8)

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

/* A weight and a bias a layer, like those that are trained, or None for all; `corrects`: corrections, else anchors. */
static int take_pull(Work *w, Buffers *b, PyObject *arrays, int corrects) {
    if (!arrays || arrays == Py_None) return 0;
    if (!PyList_Check(arrays) || PyList_Size(arrays) != 2 * w->layers) {
        PyErr_SetString(PyExc_ValueError, "what pulls the weights must be like them");
        return -1;
    }
    for (int l = 0; l < w->layers; l++) {
        Layer *a = &w->layer[l];
        float **to = corrects ? a->their_correction : a->their_anchor;
        PyObject *bias = PyList_GetItem(arrays, 2 * l + 1);
        if (!(to[0] = borrow(b, PyList_GetItem(arrays, 2 * l), "a pull", 'f', 4, 0, a->in * a->out))) return -1;
        if (a->their_bias && !(to[1] = borrow(b, bias, "a pull", 'f', 4, 0, a->out))) return -1;
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

/* The twister as torch starts it. */
static int start_twister(Twister *t, PyObject *seed) {
    t->state[0] = (uint32_t)PyLong_AsUnsignedLongLongMask(seed);
    if (PyErr_Occurred()) return -1;
    for (uint32_t i = 1; i < TWISTER; i++)
        t->state[i] = 1812433253u * (t->state[i - 1] ^ t->state[i - 1] >> 30) + i;
    t->used = TWISTER / 2;
    return 0;
}

/* For each layer None, or the probability that an input is kept and a mask, or None; and what fills the masks, or a
   seed to draw them from here. */
static int take_masks(Work *w, Buffers *b, PyObject *masks, PyObject *draw) {
    if (masks == Py_None) return 0;
    if (PyCallable_Check(draw))
        w->draw = draw;
    else if (start_twister(&w->twister, draw))
        return -1;
    if (!PyList_Check(masks) || PyList_Size(masks) != w->layers) {
        PyErr_SetString(PyExc_ValueError, "a mask, or None, is wanted a layer");
        return -1;
    }
    for (int l = 0; l < w->layers; l++) {
        Layer *a = &w->layer[l];
        PyObject *item = PyList_GetItem(masks, l), *mask;
        if (item == Py_None) continue;
        if (!PyArg_ParseTuple(item, "dO", &a->kept, &mask)) return -1;
        a->drops = 1;
        if (w->draw && !(a->mask = borrow(b, mask, "a mask", 'f', 4, 0, w->longest * a->in))) return -1;
    }
    return 0;
}

static PyObject *dense_train(PyObject *self, PyObject *args) {
    PyObject *arrays, *x, *y, *rows, *lengths, *squared, *masks, *draw, *anchors = NULL, *corrections = NULL;
    Work w = {0};
    Buffers b;
    b.held = 0;
    if (!PyArg_ParseTuple(args, "O!OOOOffffOOO|OO", &PyList_Type, &arrays, &x, &y, &rows, &lengths, &w.descent.lr,
                          &w.descent.momentum, &w.descent.weight_decay, &w.descent.mu, &squared, &masks,
                          &draw, &anchors, &corrections))
        return NULL;
    w.here = instructions_here();
    PyObject *result = NULL;
    float *input, *memory;
    if (take_layers(&w, &b, arrays) || take_pull(&w, &b, anchors, 0) || take_pull(&w, &b, corrections, 1) ||
        take_samples(&w, &b, x, y, rows, lengths, squared) || take_masks(&w, &b, masks, draw))
        goto done;
    w.thread = PyEval_SaveThread();
    memory = lay_out(&w, &input);
    if (memory) {
        for (int l = 0; l < w.layers; l++) pack_layer(&w, &w.layer[l]);
        train(&w, input);
        for (int l = 0; l < w.layers; l++) unpack(&w, &w.layer[l]);
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

static PyObject *dense_draw(PyObject *self, PyObject *args) {
    PyObject *seed, *numbers;
    double kept;
    Twister t;
    Buffers b;
    b.held = 0;
    if (!PyArg_ParseTuple(args, "OdO", &seed, &kept, &numbers) || start_twister(&t, seed)) return NULL;
    float *to = borrow(&b, numbers, "a mask", 'f', 4, 1, 0);
    if (to) instructions_here().drop(&t, kept, 1, to, b.view[0].len / 4);
    while (b.held) PyBuffer_Release(&b.view[--b.held]);
    if (!to) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"train", dense_train, METH_VARARGS,
     "train(arrays, x, y, rows, lengths, lr, momentum, weight_decay, mu, squared, masks, draw, anchors=None,\n"
     "corrections=None) -> (loss, right)\n\n"
     "Train in place the weights and biases in `arrays`, batch by batch; the summed loss and hits before each step.\n\n"
     "With dropout `masks` has (kept, mask) a layer, or None, and `draw(length)` fills the masks before each step;\n"
     "or `draw` is a seed, and no mask is needed. `anchors` and `corrections` are like `arrays`: a and b of the step\n"
     "w <- w - lr (g + b + mu (w - a))."},
    {"draw", dense_draw, METH_VARARGS,
     "draw(seed, kept, numbers)\n\nMultiply numbers by 0 where a generator like torch's does not keep them."},
    {NULL, NULL, 0, NULL}};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_dense", "Training of small dense networks.", -1, methods,
                                        NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__dense(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module && PyModule_AddStringConstant(module, "instructions", instructions_here().name)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
