/* The two passes of pools.c, written once: it includes this file for each instruction set. */

typedef float NAME(Numbers) __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t NAME(Places) __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint8_t NAME(Bytes) __attribute__((vector_size(LANES), aligned(1)));
#define Numbers NAME(Numbers)
#define Places NAME(Places)
#define Bytes NAME(Bytes)

static void NAME(forth)(const Pool *p) {
    const long row = p->width * p->channels;
    long at = 0;
    for (long picture = 0; picture < p->pictures; picture++)
        for (long y = 0; y < p->down; y++)
            for (long x = 0; x < p->across; x++, at += p->channels) {
                const float *window =
                    p->in + (picture * p->height + y * p->stride) * row + x * p->stride * p->channels;
                long c = 0;
                for (; c + LANES <= p->channels; c += LANES) {
                    Numbers best = *(const Numbers *)(window + c);
                    Places place = {0};
                    for (int i = 0; i < p->side; i++)
                        for (int j = 0; j < p->side; j++) {
                            const Numbers value = *(const Numbers *)(window + i * row + j * p->channels + c);
                            const Places better = (value > best) | (value != value);
                            const Places here = (Places){0} + (int)(i * p->side + j);
                            best = (Numbers)(((Places)value & better) | ((Places)best & ~better));
                            place = (here & better) | (place & ~better);
                        }
                    const Places shut = best <= 0;
                    *(Numbers *)(p->out + at + c) = (Numbers)((Places)best & ~shut);
                    *(Bytes *)(p->where + at + c) = __builtin_convertvector(place, Bytes);
                }
                for (; c < p->channels; c++) {
                    float best = window[c];
                    int place = 0;
                    for (int i = 0; i < p->side; i++)
                        for (int j = 0; j < p->side; j++) {
                            const float value = window[i * row + j * p->channels + c];
                            if (value > best || value != value) best = value, place = (int)(i * p->side + j);
                        }
                    p->out[at + c] = best <= 0 ? 0 : best;
                    p->where[at + c] = (uint8_t)place;
                }
            }
}

static void NAME(back)(const Pool *p) {
    const long row = p->width * p->channels;
    long at = 0;
    for (long picture = 0; picture < p->pictures; picture++) {
        float *into = p->in + picture * p->height * row;
        long clean = 0; /* so many rows have been set to zero, just before they are needed */
        for (long y = 0; y < p->down; y++) {
            const long end = y * p->stride + p->side;
            memset(into + clean * row, 0, (size_t)((end - clean) * row) * sizeof(float));
            clean = end;
            for (long x = 0; x < p->across; x++, at += p->channels) {
                float *window = into + y * p->stride * row + x * p->stride * p->channels;
                long c = 0;
                for (; c + LANES <= p->channels; c += LANES) {
                    const Places shut = *(const Numbers *)(p->out + at + c) <= 0;
                    const Places slope = *(const Places *)(p->gradient + at + c) & ~shut;
                    const Places place = __builtin_convertvector(*(const Bytes *)(p->where + at + c), Places);
                    for (int i = 0; i < p->side; i++)
                        for (int j = 0; j < p->side; j++)
                            *(Numbers *)(window + i * row + j * p->channels + c) +=
                                (Numbers)(slope & (place == (int)(i * p->side + j)));
                }
                for (; c < p->channels; c++)
                    if (!(p->out[at + c] <= 0)) {
                        const int place = p->where[at + c];
                        window[place / p->side * row + place % p->side * p->channels + c] += p->gradient[at + c];
                    }
            }
        }
        memset(into + clean * row, 0, (size_t)((p->height - clean) * row) * sizeof(float));
    }
}

#undef Numbers
#undef Places
#undef Bytes
