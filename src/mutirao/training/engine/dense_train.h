/* A client's training, batch by batch: what it works with, and which products make a step. */

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
    Descent descent;                               /* DESCEND */
    const float *anchor, *correction;              /* or NULL */
    float *moment;
} Product;

#define TWISTER 624

typedef struct {
    uint32_t state[TWISTER];
    int64_t drawn[TWISTER / 2];
    long used;
} Twister;

#ifdef CHOICES
#pragma GCC push_options
#pragma GCC target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#define ROWS 6
#define WIDE 4
#include "dense_step.h"
#include "dense_masks.h"
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
#include "dense_masks.h"
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
#include "dense_masks.h"

typedef struct {
    const char *name;
    void (*product)(const Product *);
    void (*turn)(const Matrix *, const Matrix *, long, long);
    void (*drop)(Twister *, double, float, float *, long);
} Instructions;

static Instructions instructions_here(void) {
#ifdef CHOICES
    if (lanes_here() == 16) return (Instructions){"avx512", product_avx512, turn_avx512, drop_avx512};
    if (lanes_here() == 8) return (Instructions){"avx2", product_avx2, turn_avx2, drop_avx2};
#endif
    return (Instructions){"any", product_any, turn_any, drop_any};
}

typedef struct { /* what one layer works with */
    long in, out, in_fill, out_fill, rows; /* rows: inputs, and one more if there is a bias */
    Matrix weights, turned;
    float *anchor, *correction, *moment; /* laid out as the weights are, or NULL */
    float *outputs, *errors; /* a row a sample, of out_fill + FILL numbers */
    float *theirs, *their_bias;
    float *their_anchor[2], *their_correction[2]; /* of weight and bias, or NULL */
    int drops;         /* dropout: its inputs are kept with a probability, and multiplied by the inverse of it */
    double kept;
    const float *mask; /* which are kept in this step, a row a sample, or NULL to draw them here */
} Layer;

typedef struct {
    int layers;
    Layer layer[MOST_LAYERS];
    const float *x;
    const int64_t *y, *rows, *lengths;
    long steps, longest;
    Descent descent;
    Instructions here;
    uint8_t *squared; /* or NULL */
    PyObject *draw;   /* fills the masks of a step, or NULL */
    Twister twister;
    PyThreadState *thread;
    double loss;
    int64_t right;
    int bad_label, too_large, raised;
} Work;

static long filled(long n) { return (n + FILL - 1) / FILL * FILL; }

/* A weight and a bias as they came, to where they are worked with. */
static void pack(const Work *w, const Layer *l, float *weight, const float *bias, float *at) {
    const Matrix theirs = plain(weight, l->in, l->in), ours = panels(at, l->rows, l->out_fill);
    w->here.turn(&theirs, &ours, l->out, l->in);
    for (long o = 0; bias && o < l->out; o++) *place(&ours, l->in, o) = bias[o];
}

static void pack_layer(const Work *w, Layer *l) {
    pack(w, l, l->theirs, l->their_bias, l->weights.at);
    if (l->correction) pack(w, l, l->their_correction[0], l->their_correction[1], l->correction);
    if (l->anchor && l->their_anchor[0])
        pack(w, l, l->their_anchor[0], l->their_anchor[1], l->anchor);
    else if (l->anchor)
        memcpy(l->anchor, l->weights.at, l->rows * l->out_fill * sizeof(float));
}

static void unpack(const Work *w, Layer *l) {
    const Matrix theirs = plain(l->theirs, l->in, l->in);
    w->here.turn(&l->weights, &theirs, l->in, l->out);
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

static float scale_of(const Layer *l) { return l->drops && l->kept > 0 ? 1 / (float)l->kept : 1; }

/* Dropout of a layer's inputs. */
static void drop(Work *w, const Layer *l, float *in, long stride, long batch) {
    const float scale = scale_of(l);
    for (long s = 0; s < batch; s++, in += stride)
        if (!l->mask && l->kept > 0)
            w->here.drop(&w->twister, l->kept, scale, in, l->in);
        else
            for (long i = 0; i < l->in; i++) in[i] *= l->mask ? l->mask[s * l->in + i] * scale : 0;
}

static void train(Work *w, float *input) {
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
            if (a->drops) drop(w, a, in, in_stride, batch);
            Product p = {.what = FORWARD, .rows = batch, .inner = a->rows, .a = in, .a_down = in_stride, .a_along = 1,
                         .b = a->weights, .c = plain(a->outputs, a->out_fill, a->out_fill + FILL),
                         .rectify = l + 1 < w->layers};
            w->here.product(&p);
            in = a->outputs, in_stride = a->out_fill + FILL;
            for (long s = 0; s < batch; s++) a->outputs[s * in_stride + a->out] = 1; /* the next layer's bias */
        }
        if (judge(w, y, batch, w->squared ? w->squared + (rows - w->rows) : NULL)) return;
        for (int l = w->layers - 1; l >= 0; l--) {
            Layer *a = &w->layer[l], *below = a - 1;
            if (l) {
                w->here.turn(&a->weights, &a->turned, a->in, a->out);
                Product p = {.what = BACK, .rows = batch, .inner = a->out, .a = a->errors, .a_down = a->out_fill + FILL,
                             .a_along = 1, .b = a->turned, .c = plain(below->errors, a->in_fill, a->in_fill + FILL),
                             .active = below->outputs, .active_stride = a->in_fill + FILL,
                             .scale = scale_of(a)};
                w->here.product(&p);
            }
            Product p = {.what = DESCEND, .rows = a->rows, .inner = batch, .a = l ? below->outputs : input, .a_down = 1,
                         .a_along = l ? below->out_fill + FILL : input_stride,
                         .b = plain(a->errors, a->out_fill, a->out_fill + FILL), .c = a->weights,
                         .descent = w->descent, .anchor = a->anchor, .correction = a->correction,
                         .moment = a->moment};
            w->here.product(&p);
        }
    }
}

/* All the memory a client needs, in one piece that begins with zeros; returns it, or NULL. */
static float *lay_out(Work *w, float **input) {
    size_t need = (size_t)w->longest * (w->layer[0].in_fill + FILL) + FILL;
    for (int l = 0; l < w->layers; l++) {
        const Layer *a = &w->layer[l];
        need += 4 * (size_t)a->rows * a->out_fill + (size_t)a->out * a->in_fill;
        need += (size_t)w->longest * 2 * (a->out_fill + FILL);
    }
    float *memory = calloc(need, sizeof(float));
    if (!memory) return NULL;
    float *at = (float *)(((uintptr_t)memory + 63) / 64 * 64);
    *input = at, at += w->longest * (w->layer[0].in_fill + FILL);
    for (int l = 0; l < w->layers; l++) {
        Layer *a = &w->layer[l];
        a->weights = panels(at, a->rows, a->out_fill), at += a->rows * a->out_fill;
        if (w->descent.mu != 0) a->anchor = at, at += a->rows * a->out_fill;
        if (a->their_correction[0]) a->correction = at, at += a->rows * a->out_fill;
        if (w->descent.momentum != 0) a->moment = at, at += a->rows * a->out_fill;
        if (l) a->turned = panels(at, a->out, a->in_fill), at += a->out * a->in_fill;
        a->outputs = at, at += w->longest * (a->out_fill + FILL);
        a->errors = at, at += w->longest * (a->out_fill + FILL);
    }
    return memory;
}
