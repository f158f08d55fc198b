/* A whole encoder layer (attention, sum and norm, two dense layers, sum and norm), forth and back, behind
   attention_pass.h. A few samples go through at a time, so that what one part makes is in the cache for the next. */

INLINE float NAME(sum_of)(const Numbers v) {
    float sums[4];
    for (int i = 0; i < 4; i++) {
        sums[i] = v[i];
        for (int j = i + 4; j < LANES; j += 4) sums[i] += v[j];
    }
    return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

/* out = by * hat + plus, where hat is x + past less its mean, divided by its spread; 1 / spread is kept. */
static void NAME(norm)(const long rows, const long width, const float *x, const float *past, const float *by,
                       const float *plus, const float least, float *hat, float *spread, float *out) {
    for (long i = 0; i < rows; i++, x += width, past += width, hat += width, out += width) {
        Numbers sum = {0}, squares = {0};
        for (long c = 0; c < width; c += LANES) sum += AT(hat + c) = AT(x + c) + AT(past + c);
        const float mean = NAME(sum_of)(sum) / (float)width;
        for (long c = 0; c < width; c += LANES) {
            const Numbers off = AT(hat + c) - mean;
            squares += off * off;
        }
        const float scale = 1 / __builtin_sqrtf(NAME(sum_of)(squares) / (float)width + least);
        spread[i] = scale;
        for (long c = 0; c < width; c += LANES) {
            const Numbers value = (AT(hat + c) - mean) * scale;
            AT(hat + c) = value, AT(out + c) = value * AT(by + c) + AT(plus + c);
        }
    }
}

/* The slopes of what `norm` was given, those of its two weights, and those of the bias that was added before. */
static void NAME(norm_back)(const long rows, const long width, const float *gradient, const float *hat,
                            const float *spread, const float *by, float *out, float *by_slopes, float *plus_slopes,
                            float *bias_slopes) {
    for (long i = 0; i < rows; i++, gradient += width, hat += width, out += width) {
        Numbers sum = {0}, along = {0};
        for (long c = 0; c < width; c += LANES) {
            const Numbers pull = AT(gradient + c), value = AT(hat + c), own = pull * AT(by + c);
            AT(by_slopes + c) += pull * value, AT(plus_slopes + c) += pull;
            sum += own, along += own * value;
        }
        const float mean = NAME(sum_of)(sum) / (float)width, slope = NAME(sum_of)(along) / (float)width;
        for (long c = 0; c < width; c += LANES) {
            const Numbers own = AT(gradient + c) * AT(by + c);
            const Numbers made = (own - mean - AT(hat + c) * slope) * spread[i];
            AT(out + c) = made, AT(bias_slopes + c) += made;
        }
    }
}

/* slopes += a' b, for rows of a and b. */
static void NAME(learn)(const long rows, const float *a, const long wide, const float *b, const long columns,
                        float *slopes) {
    NAME(multiply)(wide, columns, rows, a, 1, wide, b, columns, slopes, columns, slopes, columns);
}

static void NAME(encode)(const Encoder *e) {
    const long width = e->width, hidden = e->hidden, length = e->attention.length;
    float *turned[4], *at = e->scratch;
    const long outs[] = {3 * width, width, hidden, width}, ins[] = {width, width, width, hidden};
    const float *weights[] = {e->weight[W_IN], e->weight[W_OUT], e->weight[W_1], e->weight[W_2]};
    for (int i = 0; i < 4; at += outs[i] * ins[i], i++)
        NAME(turn)(outs[i], ins[i], weights[i], 1, turned[i] = at);
    float *sums = at, *middle = sums + CHUNK * width;
    for (long sample = 0; sample < e->attention.samples; sample += e->together) {
        Attention a = e->attention;
        a.samples = a.samples - sample < e->together ? a.samples - sample : e->together;
        const long begin = sample * length, end = begin + a.samples * length;
        float *packed = e->packed + begin * 3 * width;
        NAME(multiply)(end - begin, 3 * width, width, e->x + begin * width, width, 1, turned[0], 3 * width,
                       e->weight[B_IN], 0, packed, 3 * width);
        a.packed = packed, a.mixed = e->mixed + begin * width, a.scales += sample * a.heads * 2 * length;
        NAME(forth)(&a);
        for (long first = begin; first < end; first += CHUNK) {
            const long rows = end - first < CHUNK ? end - first : CHUNK, from = first * width;
            float *inner = e->inner + first * hidden;
            NAME(multiply)(rows, width, width, e->mixed + from, width, 1, turned[1], width, e->weight[B_OUT], 0, sums,
                           width);
            NAME(norm)(rows, width, sums, e->x + from, e->weight[BY_1], e->weight[PLUS_1], e->least[0],
                       e->hat[0] + from, e->spread + first, middle);
            NAME(multiply)(rows, hidden, width, middle, width, 1, turned[2], hidden, e->weight[B_1], 0, inner, hidden);
            for (long c = 0; c < rows * hidden; c += LANES) {
                const Numbers value = AT(inner + c);
                const Bits shut = value <= 0;
                AT(inner + c) = (Numbers)((Bits)value & ~shut);
            }
            NAME(multiply)(rows, width, hidden, inner, hidden, 1, turned[3], width, e->weight[B_2], 0, sums, width);
            NAME(norm)(rows, width, sums, middle, e->weight[BY_2], e->weight[PLUS_2], e->least[1], e->hat[1] + from,
                       e->spread + e->attention.samples * length + first, e->y + from);
        }
    }
}

static void NAME(encode_back)(const Encoder *e) {
    const long width = e->width, hidden = e->hidden, length = e->attention.length, most = e->together * length;
    float *pulls = e->scratch, *slopes = pulls + most * width, *ends = slopes + most * 3 * width;
    float *middle = ends + CHUNK * width, *opened = middle + CHUNK * width, *past = opened + CHUNK * hidden;
    float *const *learned = e->weight_slopes;
    for (long sample = 0; sample < e->attention.samples; sample += e->together) {
        Attention a = e->attention;
        a.samples = a.samples - sample < e->together ? a.samples - sample : e->together;
        const long begin = sample * length, end = begin + a.samples * length;
        for (long first = begin; first < end; first += CHUNK) {
            const long rows = end - first < CHUNK ? end - first : CHUNK, from = first * width;
            const float *inner = e->inner + first * hidden, *hat = e->hat[0] + from;
            NAME(norm_back)(rows, width, e->gradient + from, e->hat[1] + from,
                            e->spread + e->attention.samples * length + first, e->weight[BY_2], ends, learned[BY_2],
                            learned[PLUS_2], learned[B_2]);
            NAME(learn)(rows, ends, width, inner, hidden, learned[W_2]);
            NAME(multiply)(rows, hidden, width, ends, width, 1, e->weight[W_2], hidden, NULL, 0, opened, hidden);
            for (long i = 0; i < rows; i++)
                for (long c = 0; c < hidden; c += LANES) {
                    const Bits shut = AT(inner + i * hidden + c) <= 0;
                    const Numbers value = (Numbers)((Bits)AT(opened + i * hidden + c) & ~shut);
                    AT(opened + i * hidden + c) = value, AT(learned[B_1] + c) += value;
                }
            for (long i = 0; i < rows * width; i += width)
                for (long c = 0; c < width; c += LANES)
                    AT(middle + i + c) = AT(hat + i + c) * AT(e->weight[BY_1] + c) + AT(e->weight[PLUS_1] + c);
            NAME(learn)(rows, opened, hidden, middle, width, learned[W_1]);
            NAME(multiply)(rows, width, hidden, opened, hidden, 1, e->weight[W_1], width, ends, width, past, width);
            NAME(norm_back)(rows, width, past, hat, e->spread + first, e->weight[BY_1], e->x_slopes + from,
                            learned[BY_1], learned[PLUS_1], learned[B_OUT]);
            NAME(learn)(rows, e->x_slopes + from, width, e->mixed + from, width, learned[W_OUT]);
            NAME(multiply)(rows, width, width, e->x_slopes + from, width, 1, e->weight[W_OUT], width, NULL, 0,
                           pulls + (first - begin) * width, width);
        }
        a.packed = e->packed + begin * 3 * width, a.gradient = pulls, a.slopes = slopes;
        a.scales += sample * a.heads * 2 * length;
        NAME(back)(&a);
        for (long first = begin; first < end; first += CHUNK) {
            const long rows = end - first < CHUNK ? end - first : CHUNK, from = first * width;
            const float *own = slopes + (first - begin) * 3 * width;
            for (long i = 0; i < rows; i++)
                for (long c = 0; c < 3 * width; c += LANES) AT(learned[B_IN] + c) += AT(own + i * 3 * width + c);
            NAME(learn)(rows, own, 3 * width, e->x + from, width, learned[W_IN]);
            NAME(multiply)(rows, width, 3 * width, own, 3 * width, 1, e->weight[W_IN], width, e->x_slopes + from, width,
                           e->x_slopes + from, width);
        }
    }
}

#undef Numbers
#undef Bits
#undef AT
#undef ROUNDED
