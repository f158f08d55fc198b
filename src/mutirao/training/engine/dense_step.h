/* Products and transpositions, written once for any vector width: dense.c includes this file for each instruction set.

   A layer's weights lie transposed, one row an input and the bias as one more row, whose input is 1; rows are filled
   up with zeros to whole vectors. So a forward pass, a pass of errors back and a step of descent are each one product,
   whose result is finished while it is still in registers. */

typedef float NAME(vec) __attribute__((vector_size(4 * LANES), aligned(4)));
#define vec NAME(vec)

/* acc = A B for `rows` rows and `wide` vectors; element (i, k) of A is a[i * down + k * along]. */
ALWAYS void NAME(multiply)(const int rows, const int wide, long inner, const float *a, long down, long along,
                           const float *b, long stride, vec acc[ROWS][WIDE]) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) acc[i][j] = (vec){0};
    for (long k = 0; k < inner; k++) {
        vec row[WIDE];
        for (int j = 0; j < wide; j++) row[j] = *(const vec *)(b + k * stride + j * LANES);
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide; j++) acc[i][j] += a[i * down + k * along] * row[j];
    }
}

/* What is done with `acc`, which belongs to row i0 and the columns from j0, and goes to `c`. */
ALWAYS void NAME(finish)(const What what, const int rows, const int wide, const Product *p, long i0, long j0, float *c, long stride,
                         vec acc[ROWS][WIDE]) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) {
            vec value = acc[i][j], *to = (vec *)(c + i * stride + j * LANES);
            if (what == FORWARD) {
                if (p->rectify) value = (vec)((__typeof__(value > value))value & (value > (vec){0}));
                *to = value;
            } else if (what == BACK) { /* errors pass where the unit was active */
                vec active = *(const vec *)(p->active + (i0 + i) * p->active_stride + j0 + j * LANES);
                *to = (vec)((__typeof__(value > value))(value * p->scale) & (active > (vec){0}));
            } else {
                const Descent d = p->descent;
                const long at = (float *)to - p->c.at;
                vec weight = *to;
                if (d.mu != 0) value += d.mu * (weight - *(const vec *)(p->anchor + at));
                if (p->correction) value += *(const vec *)(p->correction + at);
                if (d.weight_decay != 0) value += d.weight_decay * weight;
                if (d.momentum != 0) {
                    vec *moment = (vec *)(p->moment + at);
                    *moment = value = d.momentum * *moment + value;
                }
                *to = weight - d.lr * value;
            }
        }
}

#define BLOCK(rows, wide)                                                                                           \
    do {                                                                                                            \
        vec acc[ROWS][WIDE];                                                                                        \
        float *to = c + i * c_stride + j;                                                                           \
        if (what == DESCEND)                                                                                     \
            for (int r = 0; r < rows; r++)                                                                          \
                for (int v = 0; v < wide * LANES; v += 16) __builtin_prefetch(to + r * c_stride + v, 1);            \
        NAME(multiply)(rows, wide, p->inner, p->a + i * p->a_down, p->a_down, p->a_along, b + j, b_stride, acc);    \
        NAME(finish)(what, rows, wide, p, i, at + j, to, c_stride, acc);                                                  \
    } while (0)

#define BLOCKS(wide)                                                                                                \
    do {                                                                                                            \
        long i = 0;                                                                                                 \
        for (; i + ROWS <= p->rows && i + 8 != p->rows; i += ROWS) BLOCK(ROWS, wide);                               \
        for (; i + 4 <= p->rows; i += 4) BLOCK(4, wide); /* the last eight as four and four */                      \
        for (; i < p->rows; i++) BLOCK(1, wide);                                                                    \
    } while (0)

ALWAYS void NAME(product_of)(const What what, const Product *p) {
    for (long at = 0; at < p->c.columns; at += PANEL) {
        const float *b = place(&p->b, 0, at);
        float *c = place(&p->c, 0, at);
        const long b_stride = stride_at(&p->b, at), c_stride = stride_at(&p->c, at);
        const long width = p->c.columns - at < PANEL ? p->c.columns - at : PANEL;
        long j = 0;
        for (; j + WIDE * LANES <= width; j += WIDE * LANES) BLOCKS(WIDE);
        for (; j + 2 * LANES <= width; j += 2 * LANES) BLOCKS(2);
        for (; j < width; j += LANES) BLOCKS(1);
    }
}

static void NAME(forward)(const Product *p) { NAME(product_of)(FORWARD, p); }
static void NAME(back)(const Product *p) { NAME(product_of)(BACK, p); }
static void NAME(descend)(const Product *p) { NAME(product_of)(DESCEND, p); }
static void NAME(product)(const Product *p) {
    p->what == FORWARD ? NAME(forward)(p) : p->what == BACK ? NAME(back)(p) : NAME(descend)(p);
}

#if LANES == 16
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST 0, 4, 1, 5
#define SECOND 2, 6, 3, 7
#endif
/* B = A' for a square of vectors: the first and the second half of the rows are dealt like cards until all is turned. */
ALWAYS void NAME(turn_square)(const float *a, long down, float *b, long across) {
    typedef int ints __attribute__((vector_size(4 * LANES), unused));
    vec row[LANES], dealt[LANES];
    for (int i = 0; i < LANES; i++) row[i] = *(const vec *)(a + i * down);
    for (int half = 1; half < LANES; half *= 2) {
        for (int i = 0; i < LANES / 2; i++) {
            dealt[2 * i] = SHUFFLE(row[i], row[i + LANES / 2], ints, FIRST);
            dealt[2 * i + 1] = SHUFFLE(row[i], row[i + LANES / 2], ints, SECOND);
        }
        for (int i = 0; i < LANES; i++) row[i] = dealt[i];
    }
    for (int i = 0; i < LANES; i++) *(vec *)(b + i * across) = row[i];
}
#undef FIRST
#undef SECOND

/* B = A' for `rows` rows and `columns` columns of A. */
static void NAME(turn)(const Matrix *a, const Matrix *b, long rows, long columns) {
    for (long j = 0; j < columns; j += LANES)
        for (long i = 0; i < rows; i += LANES) {
            const float *from = place(a, i, j);
            float *to = place(b, j, i);
            const long down = stride_at(a, j), across = stride_at(b, i);
            if (i + LANES <= rows && j + LANES <= columns)
                NAME(turn_square)(from, down, to, across);
            else
                for (long c = 0; c < LANES && j + c < columns; c++)
                    for (long r = 0; r < LANES && i + r < rows; r++) to[c * across + r] = from[r * down + c];
        }
}

#undef BLOCK
#undef BLOCKS
#undef vec
