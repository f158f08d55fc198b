/* The passes of attention.c, written once: it includes this file for each instruction set. */

typedef float NAME(Numbers) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t NAME(Bits) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define Numbers NAME(Numbers)
#define Bits NAME(Bits)
#define AT(place) (*(Numbers *)(place))
#define ROUNDED(n, unit) (((n) + (unit) - 1) / (unit) * (unit))

INLINE Numbers NAME(larger)(const Numbers a, const Numbers b) {
    const Bits more = a > b;
    return (Numbers)(((Bits)a & more) | ((Bits)b & ~more));
}

/* e^x for x that is not above 0, to a few units of the last place; far below it is next to 0, and of no number none. */
INLINE Numbers NAME(power)(Numbers x) {
    const Bits far = x < -87.f;
    x = (Numbers)(((Bits)((Numbers){0} - 87.f) & far) | ((Bits)x & ~far));
    const Numbers turns = (x * 1.44269504f + 12582912.f) - 12582912.f; /* to the nearest whole number */
    const Numbers r = x - turns * 0.693359375f + turns * 2.12194440e-4f;
    Numbers sum = r * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * r + 8.3334519073e-3f;
    sum = sum * r + 4.1665795894e-2f;
    sum = sum * r + 1.6666665459e-1f;
    sum = sum * r + 5.0000001201e-1f;
    sum = sum * (r * r) + r + 1.f;
    return sum * (Numbers)((__builtin_convertvector(turns, Bits) + 127) << 23);
}

/* c = a b, plus what lies at `from` unless that is NULL: a is rows x depth with these steps, b is depth x columns. */
INLINE void NAME(strip)(const int tall, const int wide, const long rows, const long depth, const float *a,
                        const long down, const long along, const float *b, const long b_apart, const float *from,
                        const long from_apart, float *c, const long c_apart) {
    for (long i = 0; i + tall <= rows; i += tall) {
        Numbers sums[8][2];
#pragma GCC unroll 8
        for (int r = 0; r < tall; r++)
#pragma GCC unroll 2
            for (int w = 0; w < wide; w++)
                sums[r][w] = from ? AT(from + (i + r) * from_apart + w * LANES) : (Numbers){0};
        const float *left = a + i * down, *right = b;
        for (long k = 0; k < depth; k++, left += along, right += b_apart) {
            Numbers row[2];
#pragma GCC unroll 2
            for (int w = 0; w < wide; w++) row[w] = AT(right + w * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < tall; r++)
#pragma GCC unroll 2
                for (int w = 0; w < wide; w++) sums[r][w] += left[r * down] * row[w];
        }
#pragma GCC unroll 8
        for (int r = 0; r < tall; r++)
#pragma GCC unroll 2
            for (int w = 0; w < wide; w++) AT(c + (i + r) * c_apart + w * LANES) = sums[r][w];
    }
}

/* The same for any number of rows and a number of columns that is a multiple of LANES. */
static void NAME(multiply)(const long rows, const long columns, const long depth, const float *a, const long down,
                           const long along, const float *b, const long b_apart, const float *from,
                           const long from_apart, float *c, const long c_apart) {
    long j = 0;
    const long most = rows / ROWS * ROWS, rest = rows - most;
    const float *last = a + most * down;
    for (; j < columns; j += 2 * LANES) {
        const float *begin = from ? from + j : NULL, *late = from ? begin + most * from_apart : NULL;
        float *end = c + j + most * c_apart;
        if (j + 2 * LANES <= columns) {
            NAME(strip)(TALL, 2, most, depth, a, down, along, b + j, b_apart, begin, from_apart, c + j, c_apart);
            NAME(strip)(1, 2, rest, depth, last, down, along, b + j, b_apart, late, from_apart, end, c_apart);
        } else {
            NAME(strip)(8, 1, most, depth, a, down, along, b + j, b_apart, begin, from_apart, c + j, c_apart);
            NAME(strip)(1, 1, rest, depth, last, down, along, b + j, b_apart, late, from_apart, end, c_apart);
        }
    }
}

/* Rows of `size` numbers, so far apart, to rows of `wide`; what was zero beyond them stays so. */
INLINE void NAME(gather)(const long rows, const long size, const float *from, const long apart, float *to,
                         const long wide) {
    for (long i = 0; i < rows; i++, from += apart, to += wide) {
        long c = 0;
        for (; c + LANES <= size; c += LANES) AT(to + c) = AT(from + c);
        for (; c < size; c++) to[c] = from[c];
    }
}

/* And back, each row times a number of its own, if there are such. */
INLINE void NAME(scatter)(const long rows, const long size, const float *from, const long wide, const float *times,
                          float *to, const long apart) {
    for (long i = 0; i < rows; i++, from += wide, to += apart) {
        const float by = times ? times[i] : 1;
        long c = 0;
        for (; c + LANES <= size; c += LANES) AT(to + c) = by * AT(from + c);
        for (; c < size; c++) to[c] = by * from[c];
    }
}

/* Rows of `size` numbers as rows of `block`, each number times `by`; both are multiples of LANES. */
INLINE void NAME(turn)(const long block, const long size, const float *from, const float by, float *to) {
    for (long i = 0; i < block; i += LANES)
        for (long c = 0; c < size; c += LANES) {
            Numbers v[LANES], w[LANES];
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) v[r] = by * AT(from + (i + r) * size + c);
#pragma GCC unroll 2
            for (int round = LANES; round > 1; round /= 4) { /* two rounds at a time, from v to w and back */
#pragma GCC unroll 8
                for (int r = 0; r < LANES / 2; r++) {
                    w[2 * r] = SHUFFLE(v[r], v[r + LANES / 2], Bits, LOW);
                    w[2 * r + 1] = SHUFFLE(v[r], v[r + LANES / 2], Bits, HIGH);
                }
                if (round == 2) {
#pragma GCC unroll 16
                    for (int r = 0; r < LANES; r++) v[r] = w[r];
                    break;
                }
#pragma GCC unroll 8
                for (int r = 0; r < LANES / 2; r++) {
                    v[2 * r] = SHUFFLE(w[r], w[r + LANES / 2], Bits, LOW);
                    v[2 * r + 1] = SHUFFLE(w[r], w[r + LANES / 2], Bits, HIGH);
                }
            }
#pragma GCC unroll 16
            for (int r = 0; r < LANES; r++) AT(to + (c + r) * block + i) = v[r];
        }
}

/* What `wide` vectors of queries, from `first` on, make of the head whose keys and values are in scratch. */
INLINE void NAME(block_forth)(const Attention *a, const int wide, const long first, const long size,
                              const float *queries, float *scales, float *mixed) {
    const long block = wide * LANES, own = a->length - first < block ? a->length - first : block;
    const long width = a->heads * a->size;
    NAME(gather)(own, a->size, queries + first * 3 * width, 3 * width, a->queries, size);
    NAME(turn)(block, size, a->queries, a->scale, a->queries_across);
    NAME(multiply)(ROUNDED(a->length, ROWS), block, a->size, a->keys, size, 1, a->queries_across, block, NULL, 0, a->shares, block);
    float most[2 * LANES], inverse[2 * LANES];
#pragma GCC unroll 2
    for (int w = 0; w < wide; w++) {
        float *shares = a->shares + w * LANES;
        Numbers top = AT(shares), sum = {0};
        for (long j = 1; j < a->length; j++) top = NAME(larger)(AT(shares + j * block), top);
        for (long j = 0; j < a->length; j++) sum += AT(shares + j * block) = NAME(power)(AT(shares + j * block) - top);
        AT(most + w * LANES) = top, AT(inverse + w * LANES) = 1 / sum;
    }
    memcpy(scales + first, most, (size_t)own * sizeof(float));
    memcpy(scales + a->length + first, inverse, (size_t)own * sizeof(float));
    NAME(multiply)(ROUNDED(own, ROWS), size, a->length, a->shares, 1, block, a->values, size, NULL, 0, a->query_slopes, size);
    NAME(scatter)(own, a->size, a->query_slopes, size, inverse, mixed + first * width, width);
}

/* What they add to the slopes of keys and values, and the slopes of their own. */
INLINE void NAME(block_back)(const Attention *a, const int wide, const long first, const long size,
                             const float *queries, const float *scales, const float *gradient, float *slopes) {
    const long block = wide * LANES, own = a->length - first < block ? a->length - first : block;
    const long width = a->heads * a->size, rows = ROUNDED(a->length, ROWS);
    NAME(gather)(own, a->size, queries + first * 3 * width, 3 * width, a->queries, size);
    NAME(gather)(own, a->size, gradient + first * width, width, a->pulls, size);
    NAME(turn)(block, size, a->queries, a->scale, a->queries_across);
    NAME(turn)(block, size, a->pulls, 1, a->pulls_across);
    NAME(multiply)(rows, block, a->size, a->keys, size, 1, a->queries_across, block, NULL, 0, a->shares, block);
    NAME(multiply)(rows, block, a->size, a->values, size, 1, a->pulls_across, block, NULL, 0, a->share_slopes, block);
    float most[2 * LANES] = {0}, inverse[2 * LANES] = {0};
    memcpy(most, scales + first, (size_t)own * sizeof(float));
    memcpy(inverse, scales + a->length + first, (size_t)own * sizeof(float));
#pragma GCC unroll 2
    for (int w = 0; w < wide; w++) {
        float *shares = a->shares + w * LANES, *share_slopes = a->share_slopes + w * LANES;
        const Numbers top = AT(most + w * LANES), by = AT(inverse + w * LANES);
        Numbers mean = {0};
        for (long j = 0; j < a->length; j++) {
            const Numbers share = by * NAME(power)(AT(shares + j * block) - top);
            AT(shares + j * block) = share;
            mean += share * AT(share_slopes + j * block);
        }
        for (long j = 0; j < a->length; j++)
            AT(share_slopes + j * block) = a->scale * AT(shares + j * block) * (AT(share_slopes + j * block) - mean);
    }
    NAME(multiply)(rows, size, own, a->share_slopes, block, 1, a->queries, size, a->key_slopes, size, a->key_slopes, size);
    NAME(multiply)(rows, size, own, a->shares, block, 1, a->pulls, size, a->value_slopes, size, a->value_slopes, size);
    NAME(multiply)(ROUNDED(own, ROWS), size, a->length, a->share_slopes, 1, block, a->keys, size, NULL, 0, a->query_slopes, size);
    NAME(scatter)(own, a->size, a->query_slopes, size, NULL, slopes + first * 3 * width, 3 * width);
}

INLINE void NAME(all_heads)(const Attention *a, const int backwards) {
    const long size = ROUNDED(a->size, LANES), width = a->heads * a->size, apart = 3 * width;
    for (long sample = 0; sample < a->samples; sample++)
        for (long head = 0; head < a->heads; head++) {
            const float *packed = a->packed + sample * a->length * apart + head * a->size;
            float *scales = a->scales + (sample * a->heads + head) * 2 * a->length;
            float *slopes = backwards ? a->slopes + sample * a->length * apart + head * a->size : NULL;
            const long out = sample * a->length * width + head * a->size;
            NAME(gather)(a->length, a->size, packed + width, apart, a->keys, size);
            NAME(gather)(a->length, a->size, packed + 2 * width, apart, a->values, size);
            if (backwards) {
                const size_t bytes = (size_t)(ROUNDED(a->length, ROWS) * size) * sizeof(float);
                memset(a->key_slopes, 0, bytes), memset(a->value_slopes, 0, bytes);
            }
            long first = 0;
            for (; first + LANES < a->length; first += 2 * LANES)
                if (backwards)
                    NAME(block_back)(a, 2, first, size, packed, scales, a->gradient + out, slopes);
                else
                    NAME(block_forth)(a, 2, first, size, packed, scales, a->mixed + out);
            for (; first < a->length; first += LANES)
                if (backwards)
                    NAME(block_back)(a, 1, first, size, packed, scales, a->gradient + out, slopes);
                else
                    NAME(block_forth)(a, 1, first, size, packed, scales, a->mixed + out);
            if (backwards) {
                NAME(scatter)(a->length, a->size, a->key_slopes, size, NULL, slopes + width, apart);
                NAME(scatter)(a->length, a->size, a->value_slopes, size, NULL, slopes + 2 * width, apart);
            }
        }
}

static void NAME(forth)(const Attention *a) { NAME(all_heads)(a, 0); }

static void NAME(back)(const Attention *a) { NAME(all_heads)(a, 1); }
