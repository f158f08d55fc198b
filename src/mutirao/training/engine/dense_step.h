/* One client's descent, written once for any vector width: dense.c includes this file for each instruction set.

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

ALWAYS void NAME(finish)(const int rows, const int wide, const Product *p, long i0, long j0, vec acc[ROWS][WIDE]) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < wide; j++) {
            long at = (i0 + i) * p->c_stride + j0 + j * LANES;
            vec value = acc[i][j], *c = (vec *)(p->c + at);
            if (p->what == FORWARD) {
                if (p->rectify) value = (vec)((__typeof__(value > value))value & (value > (vec){0}));
                *c = value;
            } else if (p->what == BACK) { /* errors pass where the unit was active */
                vec active = *(const vec *)(p->active + (i0 + i) * p->active_stride + j0 + j * LANES);
                *c = (vec)((__typeof__(value > value))value & (active > (vec){0}));
            } else {
                const Descent *d = p->descent;
                vec weight = *c;
                if (d->mu != 0) value += d->mu * (weight - *(const vec *)(p->origin + at));
                if (d->weight_decay != 0) value += d->weight_decay * weight;
                if (d->momentum != 0) {
                    vec *moment = (vec *)(p->moment + at);
                    *moment = value = d->momentum * *moment + value;
                }
                *c = weight - d->lr * value;
            }
        }
}

#define BLOCK(rows, wide)                                                                                           \
    do {                                                                                                            \
        vec acc[ROWS][WIDE];                                                                                        \
        NAME(multiply)(rows, wide, p->inner, p->a + i * p->a_down, p->a_down, p->a_along, p->b + j, p->b_stride, acc); \
        NAME(finish)(rows, wide, p, i, j, acc);                                                                     \
    } while (0)

#define BLOCKS(wide)                                                                                                \
    do {                                                                                                            \
        long i = 0;                                                                                                 \
        for (; i + ROWS <= p->rows && i + 8 != p->rows; i += ROWS) BLOCK(ROWS, wide);                               \
        for (; i + 4 <= p->rows; i += 4) BLOCK(4, wide); /* the last eight as four and four */                      \
        for (; i < p->rows; i++) BLOCK(1, wide);                                                                    \
    } while (0)

static void NAME(product)(const Product *p) {
    long j = 0;
    for (; j + WIDE * LANES <= p->columns; j += WIDE * LANES) BLOCKS(WIDE);
    for (; j + 2 * LANES <= p->columns; j += 2 * LANES) BLOCKS(2);
    for (; j < p->columns; j += LANES) BLOCKS(1);
}

#undef BLOCK
#undef BLOCKS
#undef vec
