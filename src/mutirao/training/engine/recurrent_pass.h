/* The passes of recurrent.c, written once: it includes this file for each instruction set. */

#define HALF (LANES / 2)
typedef float NAME(Numbers) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float NAME(Halves) __attribute__((vector_size(4 * HALF), aligned(4), may_alias));
#define Numbers NAME(Numbers)
#define Halves NAME(Halves)
#define AT(place) (*(Numbers *)(place))
#define SEEN(place) (*(const Numbers *)(place))

INLINE Numbers NAME(choose)(const __typeof__((Numbers){0} > (Numbers){0}) mask, const Numbers yes, const Numbers no) {
    return (Numbers)((mask & (__typeof__(mask))yes) | (~mask & (__typeof__(mask))no));
}

/* tanh to about 1e-7, as the quotient of two polynomials; what is no number stays so. */
INLINE Numbers NAME(tangent)(Numbers x) {
    const Numbers most = (Numbers){0} + 7.90531110763549805f;
    x = NAME(choose)(x > most, most, x);
    x = NAME(choose)(x < -most, -most, x);
    const Numbers s = x * x;
    Numbers p = s * -2.76076847742355e-16f + 2.00018790482477e-13f, q = s * 1.19825839466702e-06f + 1.18534705686654e-04f;
    p = p * s - 8.60467152213735e-11f, q = q * s + 2.26843463243900e-03f;
    p = p * s + 5.12229709037114e-08f, q = q * s + 4.89352518554385e-03f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    return x * p / q;
}

/* c = start + one b + two b for `rows` rows; b is (depth of one and two) x (wide vectors), packed. */
#define STRIP(strip, Vector, lanes)                                                                                  \
    INLINE const float *NAME(strip##_of)(const int rows, const int wide, const Left left, const float *b,            \
                                         Vector sums[ROWS][WIDE]) {                                                  \
        const float *a = left.a;                                                                                     \
        for (long k = 0; k < left.depth; k++, a += left.along, b += wide * lanes) {                                  \
            Vector right[WIDE];                                                                                      \
            for (int j = 0; j < wide; j++) right[j] = *(const Vector *)(b + j * lanes);                              \
            for (int i = 0; i < rows; i++)                                                                           \
                for (int j = 0; j < wide; j++) sums[i][j] += a[i * left.down] * right[j];                            \
        }                                                                                                            \
        return b;                                                                                                    \
    }                                                                                                                \
    INLINE void NAME(strip)(const int rows, const int wide, const Left one, const Left two, const float *b,          \
                            const float *start, const long next, float *c, const long stride) {                      \
        Vector sums[ROWS][WIDE];                                                                                     \
        for (int i = 0; i < rows; i++)                                                                               \
            for (int j = 0; j < wide; j++) {                                                                         \
                sums[i][j] = (Vector){0};                                                                            \
                if (start) sums[i][j] = *(const Vector *)(start + i * next + j * lanes);                             \
            }                                                                                                        \
        b = NAME(strip##_of)(rows, wide, one, b, sums);                                                              \
        NAME(strip##_of)(rows, wide, two, b, sums);                                                                  \
        for (int i = 0; i < rows; i++)                                                                               \
            for (int j = 0; j < wide; j++) *(Vector *)(c + i * stride + j * lanes) = sums[i][j];                     \
    }
STRIP(strip, Numbers, LANES)
STRIP(narrow, Halves, HALF)
#undef STRIP

/* How many columns the strip that begins with `left` columns to go has. */
INLINE long NAME(width)(const long left) {
    return left >= WIDE * LANES ? WIDE * LANES : left >= 2 * LANES ? 2 * LANES : left >= LANES ? LANES : HALF;
}

/* The matrix b, depth x columns or (if `turned`) its transpose, strip by strip. Strips are `tall` and may hold `above`
   rows of another matrix first; the last is filled up with zeros. */
static void NAME(pack)(const float *b, const long depth, const long columns, const int turned, float *packed,
                       const long above, const long tall) {
    for (long j = 0, width; j < columns; j += width) {
        width = NAME(width)(columns - j);
        const long there = columns - j < width ? columns - j : width;
        float *to = packed + tall * j + above * width;
        if (there < width) memset(to, 0, (size_t)(depth * width) * sizeof(float));
        if (turned)
            for (long i = 0; i < there; i++)
                for (long k = 0; k < depth; k++) to[k * width + i] = b[(j + i) * depth + k];
        else
            for (long k = 0; k < depth; k++)
                for (long i = 0; i < there; i++) to[k * width + i] = b[k * columns + j + i];
    }
}

/* The gates bent in place: s tanh(s x) + 1 - s is the sigmoid for s = 1/2, tanh for s = 1. */
INLINE void NAME(bend)(float *x, const float *by, const long count) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Numbers s = SEEN(by + i);
        AT(x + i) = s * NAME(tangent)(s * SEEN(x + i)) + (1 - s);
    }
    if (i < count) {
        Numbers last = {0}, s = {0};
        memcpy(&last, x + i, (size_t)(count - i) * sizeof(float));
        memcpy(&s, by + i, (size_t)(count - i) * sizeof(float));
        last = s * NAME(tangent)(s * last) + (1 - s);
        memcpy(x + i, &last, (size_t)(count - i) * sizeof(float));
    }
}

/* One strip of `width` columns, of which `there` are real, for `rows` rows. */
INLINE void NAME(tile)(const int rows, const long width, const long there, const Left one, const Left two,
                       const float *b, const float *start, const long next, float *c, const long stride) {
    if (width == WIDE * LANES)
        NAME(strip)(rows, WIDE, one, two, b, start, next, c, stride);
    else if (width == 2 * LANES)
        NAME(strip)(rows, 2, one, two, b, start, next, c, stride);
    else if (width == LANES)
        NAME(strip)(rows, 1, one, two, b, start, next, c, stride);
    else {
        float last[ROWS * HALF] = {0};
        for (int i = 0; start && i < rows; i++)
            for (long j = 0; j < there; j++) last[i * HALF + j] = start[i * next + j];
        NAME(narrow)(rows, 1, one, two, b, last, HALF, last, HALF);
        for (int i = 0; i < rows; i++)
            for (long j = 0; j < there; j++) c[i * stride + j] = last[i * HALF + j];
    }
}

/* The same for any number of rows; then bent by `by`, if that is given, while it is in the cache. */
static void NAME(column)(const long rows, const long width, const long there, Left one, Left two, const float *b,
                         const float *start, const long next, float *c, const long stride, const float *by) {
    long done = 0;
#define TILE(count)                                                                                 \
    for (; done + (count) <= rows; done += (count)) {                                               \
        NAME(tile)(count, width, there, one, two, b, start, next, c, stride);                       \
        for (int i = 0; by && i < (count); i++) NAME(bend)(c + i * stride, by, there);              \
        one.a += (count) * one.down, two.a += (count) * two.down, c += (count) * stride;            \
        if (start) start += (count) * next;                                                         \
    }
    TILE(ROWS)
    TILE(4)
    TILE(2)
    TILE(1)
#undef TILE
}

/* c = start + one b + two b, where b is packed in strips that are `tall`; then bent by `by`, if that is given. */
static void NAME(multiply)(const long rows, const long columns, const Left one, const Left two, const float *b,
                           const long tall, const float *start, float *c, const float *by) {
    for (long j = 0, width; j < columns; j += width) {
        width = NAME(width)(columns - j);
        const long there = columns - j < width ? columns - j : width;
        NAME(column)(rows, width, there, one, two, b + tall * j, start ? start + j : NULL, 0, c + j, columns,
                     by ? by + j : NULL);
    }
}

/* slopes += left' errors, and sums += the errors' sums, for `count` rows of errors; left is count x features. */
static void NAME(accumulate)(const long count, const long columns, const float *errors, const float *x,
                             const long features, float *x_sums, const float *h, const long units, float *h_sums,
                             float *sums, float *packed) {
    const Left none = {0};
    for (long from = 0; from < count; from += BLOCK) {
        const long rows = count - from < BLOCK ? count - from : BLOCK;
        const Left inputs = {x + from * features, 1, features, rows};
        for (long j = 0, width; j < columns; j += width) {
            width = NAME(width)(columns - j);
            const long there = columns - j < width ? columns - j : width;
            float total[WIDE * LANES] = {0};
            const float *error = errors + from * columns + j;
            for (long k = 0; k < rows; k++, error += columns)
                for (long i = 0; i < width; i++) {
                    const float value = i < there ? error[i] : 0;
                    packed[k * width + i] = value, total[i] += value;
                }
            for (long i = 0; i < there; i++) sums[j + i] += total[i];
            NAME(column)(features, width, there, inputs, none, packed, x_sums + j, columns, x_sums + j, columns, NULL);
            if (h) {
                const Left states = {h + from * units, 1, units, rows};
                NAME(column)(units, width, there, states, none, packed, h_sums + j, columns, h_sums + j, columns, NULL);
            }
        }
    }
}

/* The transpose of a matrix of rows x columns. */
static void NAME(turn)(const float *from, const long rows, const long columns, float *to) {
    for (long j = 0; j < columns; j += LANES)
        for (long i = 0; i < rows; i++)
            for (long at = j; at < j + LANES && at < columns; at++) to[at * rows + i] = from[i * columns + at];
}

/* One vector of units of one sample goes a step on: c = forget c + in new, h = out tanh(c). */
INLINE void NAME(move)(const float *gates, const long units, const float *before, float *c, float *h) {
    Numbers cell = SEEN(gates) * SEEN(gates + 2 * units);
    if (before) cell += SEEN(gates + units) * SEEN(before);
    AT(c) = cell;
    AT(h) = SEEN(gates + 3 * units) * NAME(tangent)(cell);
}

/* And back: the slopes of gates and of the cell before, from those of h (two that add up) and of c. */
INLINE void NAME(unmove)(const float *gates, const long units, const float *before, const float *c, const float *h_slopes,
                         const float *more, const float *c_slopes, float *errors, float *before_slopes) {
    const Numbers in = SEEN(gates), forget = SEEN(gates + units), new = SEEN(gates + 2 * units);
    const Numbers out = SEEN(gates + 3 * units), bent = NAME(tangent)(SEEN(c));
    Numbers dh = {0}, dc = {0}, past = {0};
    if (before) past = SEEN(before);
    if (h_slopes) dh += SEEN(h_slopes);
    if (more) dh += SEEN(more);
    if (c_slopes) dc += SEEN(c_slopes);
    dc += dh * out * (1 - bent * bent);
    AT(errors) = dc * new * in * (1 - in);
    AT(errors + units) = dc * past * forget * (1 - forget);
    AT(errors + 2 * units) = dc * in * (1 - new * new);
    AT(errors + 3 * units) = dh * bent * out * (1 - out);
    AT(before_slopes) = dc * forget;
}

static void NAME(forth)(const Recurrence *r) {
    const long units = r->units, gates = GATES * units, state = r->batch * units, features = r->features;
    const long tall = features + units;
    NAME(pack)(r->w_in, features, gates, 1, r->packed, 0, tall);
    NAME(pack)(r->w, units, gates, 1, r->packed, features, tall);
    for (long t = 0; t < r->steps; t++) {
        float *bent = r->gates + t * r->batch * gates, *h = r->h + t * state, *c = r->c + t * state;
        const float *h_before = t ? h - state : r->h0, *c_before = t ? c - state : r->c0;
        const Left x = {r->x + t * r->batch * features, features, 1, features};
        const Left before = {h_before, units, 1, h_before ? units : 0};
        NAME(multiply)(r->batch, gates, x, before, r->packed, tall, r->bias, bent, r->bend);
        for (long i = 0; i < r->batch; i++)
            for (long u = 0; u < units; u += LANES) { /* the last vector may overlap the one before */
                const long first = u + LANES <= units ? u : units - LANES, at = i * units + first;
                NAME(move)(bent + i * gates + first, units, c_before ? c_before + at : NULL, c + at, h + at);
            }
    }
}

static void NAME(back)(const Recurrence *r) {
    const long units = r->units, gates = GATES * units, state = r->batch * units, features = r->features;
    const float *c_slopes = r->c_slopes, *more = NULL;
    const Left none = {0};
    float *w_packed = r->packed + gates * (features + 16);
    if (r->x_slopes) NAME(pack)(r->w_in, gates, features, 0, r->packed, 0, gates);
    NAME(pack)(r->w, gates, units, 0, w_packed, 0, gates);
    for (long t = r->steps - 1, last = t, lowest = t + 1; t >= 0; t--) {
        if (t < lowest) last = t, lowest = t == 0 ? 0 : t < r->together ? 1 : t - r->together + 1;
        const float *bent = r->gates + t * r->batch * gates, *c = r->c + t * state, *before = t ? c - state : r->c0;
        const float *h_slopes = r->h_slopes ? r->h_slopes + t * state : NULL;
        float *errors = r->errors + (t - lowest) * r->batch * gates, *into = t % 2 ? r->spare : r->c0_slopes;
        for (long i = 0; i < r->batch; i++)
            for (long u = 0; u < units; u += LANES) {
                const long first = u + LANES <= units ? u : units - LANES, at = i * units + first, gate = i * gates + first;
                NAME(unmove)(bent + gate, units, before ? before + at : NULL, c + at, h_slopes ? h_slopes + at : NULL,
                             more ? more + at : NULL, c_slopes ? c_slopes + at : NULL, errors + gate, into + at);
            }
        const Left wrong = {errors, gates, 1, gates};
        if (t || r->whole) NAME(multiply)(r->batch, units, wrong, none, w_packed, gates, NULL, r->h0_slopes, NULL);
        if (r->x_slopes)
            NAME(multiply)(r->batch, features, wrong, none, r->packed, gates, NULL, r->x_slopes + t * r->batch * features,
                           NULL);
        c_slopes = into, more = r->h0_slopes;
        if (t == lowest)
            NAME(accumulate)((last - t + 1) * r->batch, gates, r->errors, r->x + t * r->batch * features, features, r->x_sums,
                             t ? r->h + (t - 1) * state : r->h0, units, r->h_sums, r->bias_slopes, r->block);
    }
    NAME(turn)(r->x_sums, features, gates, r->w_in_slopes);
    NAME(turn)(r->h_sums, units, gates, r->w_slopes);
}

#undef Numbers
#undef Halves
#undef HALF
#undef AT
#undef SEEN
