/* The passes of winograd.c, written once: it includes this file for each instruction set.

   A tile is two polynomials in one (rows and columns), known by their values at 0, 1, -1, 2, -2 and infinity. */

typedef float NAME(Numbers) __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
#define Numbers NAME(Numbers)

/* The values of the polynomial with these n coefficients at the six points. */
INLINE void NAME(spread)(const int n, const Numbers *y, const int every, Numbers *t, const int apart) {
    Numbers even = y[0], odd = y[every], even2 = y[0], odd2 = 2 * y[every];
#pragma GCC unroll 4
    for (int i = 2; i < n; i++)
        if (i % 2)
            odd += y[i * every], odd2 += (float)(1 << i) * y[i * every];
        else
            even += y[i * every], even2 += (float)(1 << i) * y[i * every];
    t[0] = y[0], t[apart] = even + odd, t[2 * apart] = even - odd;
    t[3 * apart] = even2 + odd2, t[4 * apart] = even2 - odd2, t[5 * apart] = y[(n - 1) * every];
}

/* The transpose of `spread`. */
INLINE void NAME(collect)(const int n, const Numbers *t, const int apart, Numbers *y, const int every) {
    const Numbers even = t[apart] + t[2 * apart], odd = t[apart] - t[2 * apart];
    const Numbers even2 = t[3 * apart] + t[4 * apart], odd2 = t[3 * apart] - t[4 * apart];
#pragma GCC unroll 5
    for (int i = 0; i < n; i++) {
        Numbers sum = i % 2 ? odd + (float)(1 << i) * odd2 : even + (float)(1 << i) * even2;
        if (i == 0) sum += t[0];
        if (i == n - 1) sum += t[5 * apart];
        y[i * every] = sum;
    }
}

/* Six numbers of a picture as the products of values need them. */
INLINE void NAME(enter)(const Numbers *x, const int every, Numbers *t, const int apart) {
    const Numbers near = x[4 * every] - x[2 * every], far = x[4 * every] - 4 * x[2 * every];
    const Numbers side = 2 * (x[3 * every] - x[every]), slope = x[3 * every] - 4 * x[every];
    t[0] = 4 * (x[0] - x[2 * every]) + near, t[apart] = far + slope, t[2 * apart] = far - slope;
    t[3 * apart] = near + side, t[4 * apart] = near - side;
    t[5 * apart] = 4 * (x[every] - x[3 * every]) - x[3 * every] + x[5 * every];
}

/* The transpose of `enter`. */
INLINE void NAME(leave)(const Numbers *t, const int apart, Numbers *x, const int every) {
    const Numbers sum = t[apart] + t[2 * apart], difference = t[apart] - t[2 * apart];
    const Numbers sum2 = t[3 * apart] + t[4 * apart], difference2 = 2 * (t[3 * apart] - t[4 * apart]);
    x[0] = 4 * t[0], x[every] = 4 * (t[5 * apart] - difference) - difference2;
    x[2 * every] = -5 * t[0] - 4 * sum - sum2, x[3 * every] = difference + difference2 - 5 * t[5 * apart];
    x[4 * every] = t[0] + sum + sum2, x[5 * every] = t[5 * apart];
}

/* How much each point counts; it is put on the weights. */
INLINE float NAME(share)(const int point) {
    const float shares[6] = {1 / 4.f, -1 / 6.f, -1 / 6.f, 1 / 24.f, 1 / 24.f, 1};
    return shares[point / 6] * shares[point % 6];
}

/* c = a b, or c += a b, where a is rows x depth with these steps, b is depth x columns, and ROWS rows go together. */
INLINE void NAME(strip)(const int wide, const long rows, const long columns, const long depth, const float *a,
                        const long down, const long along, const float *b, float *c, const int add) {
    for (long i = 0; i < rows; i += ROWS) {
        Numbers sums[ROWS][WIDE];
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++)
                sums[r][w] = (Numbers){0};
        const float *left = a + i * down, *right = b;
        for (long k = 0; k < depth; k++, left += along, right += columns) {
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
                for (int w = 0; w < wide; w++) sums[r][w] += left[r * down] * *(const Numbers *)(right + w * LANES);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) {
                float *to = c + (i + r) * columns + w * LANES;
                if (add) sums[r][w] += *(const Numbers *)to;
                *(Numbers *)to = sums[r][w];
            }
    }
}

static void NAME(multiply)(long rows, long columns, long depth, const float *a, long down, long along, const float *b,
                           float *c, int add) {
    long j = 0;
    for (; j + WIDE * LANES <= columns; j += WIDE * LANES)
        NAME(strip)(WIDE, rows, columns, depth, a, down, along, b + j, c + j, add);
    for (; j + 2 * LANES <= columns; j += 2 * LANES)
        NAME(strip)(2, rows, columns, depth, a, down, along, b + j, c + j, add);
    for (; j < columns; j += LANES) NAME(strip)(1, rows, columns, depth, a, down, along, b + j, c + j, add);
}

/* The kernels, side x side x rows x columns, as POINTS matrices. */
INLINE void NAME(kernels_enter)(const int side, const float *weight, const long size, float *kernels) {
    for (long at = 0; at < size; at += LANES) {
        Numbers w[25], middle[30], t[POINTS];
        for (int i = 0; i < side * side; i++) w[i] = *(const Numbers *)(weight + i * size + at);
        for (int i = 0; i < side; i++) NAME(spread)(side, w + i * side, 1, middle + i * 6, 1);
        for (int j = 0; j < 6; j++) NAME(spread)(side, middle + j, 6, t + j, 6);
        for (int p = 0; p < POINTS; p++) *(Numbers *)(kernels + p * (size + APART) + at) = NAME(share)(p) * t[p];
    }
}

/* Its transpose. */
INLINE void NAME(kernels_leave)(const int side, const float *kernels, const long size, float *weight) {
    for (long at = 0; at < size; at += LANES) {
        Numbers w[25], middle[30], t[POINTS];
        for (int p = 0; p < POINTS; p++) t[p] = NAME(share)(p) * *(const Numbers *)(kernels + p * (size + APART) + at);
        for (int j = 0; j < 6; j++) NAME(collect)(side, t + j, 6, middle + j, 6);
        for (int i = 0; i < side; i++) NAME(collect)(side, middle + i * 6, 1, w + i * side, 1);
        for (int i = 0; i < side * side; i++) *(Numbers *)(weight + i * size + at) = w[i];
    }
}

/* The tile of a picture at these places, as row `row` of POINTS matrices. */
INLINE void NAME(tile_enters)(float *const *from, const long channels, float *ins, const long apart, const long row) {
    for (long at = 0; at < channels; at += LANES) {
        Numbers x[POINTS], middle[POINTS];
        for (int i = 0; i < POINTS; i++) x[i] = *(const Numbers *)(from[i] + at);
        for (int i = 0; i < 6; i++) NAME(enter)(x + i * 6, 1, middle + i * 6, 1);
        for (int j = 0; j < 6; j++) NAME(enter)(middle + j, 6, x + j, 6);
        for (int p = 0; p < POINTS; p++) *(Numbers *)(ins + p * apart + row * channels + at) = x[p];
    }
}

/* Its transpose, added to what is there. */
INLINE void NAME(tile_leaves)(float *const *to, const long channels, const float *ins, const long apart, const long row) {
    for (long at = 0; at < channels; at += LANES) {
        Numbers x[POINTS], middle[POINTS];
        for (int p = 0; p < POINTS; p++) x[p] = *(const Numbers *)(ins + p * apart + row * channels + at);
        for (int j = 0; j < 6; j++) NAME(leave)(x + j, 6, middle + j, 6);
        for (int i = 0; i < 6; i++) NAME(leave)(middle + i * 6, 1, x + i * 6, 1);
        for (int i = 0; i < POINTS; i++) *(Numbers *)(to[i] + at) += x[i];
    }
}

/* Row `row` of POINTS matrices, plus the bias, to the places of what comes out. */
INLINE void NAME(result_leaves)(const int step, float *const *to, const long channels, const float *outs,
                                const long apart, const long row, const float *bias) {
    for (long at = 0; at < channels; at += LANES) {
        Numbers t[POINTS], middle[24], y[16];
        for (int p = 0; p < POINTS; p++) t[p] = *(const Numbers *)(outs + p * apart + row * channels + at);
        for (int j = 0; j < 6; j++) NAME(collect)(step, t + j, 6, middle + j, 6);
        for (int i = 0; i < step; i++) NAME(collect)(step, middle + i * 6, 1, y + i * step, 1);
        for (int i = 0; i < step * step; i++) *(Numbers *)(to[i] + at) = y[i] + *(const Numbers *)(bias + at);
    }
}

/* Its transpose. */
INLINE void NAME(result_enters)(const int step, float *const *from, const long channels, float *outs, const long apart,
                                const long row, float *bias) {
    for (long at = 0; at < channels; at += LANES) {
        Numbers t[POINTS], middle[24], y[16], sum = {0};
        for (int i = 0; i < step * step; i++) y[i] = *(const Numbers *)(from[i] + at), sum += y[i];
        for (int i = 0; i < step; i++) NAME(spread)(step, y + i * step, 1, middle + i * 6, 1);
        for (int j = 0; j < 6; j++) NAME(spread)(step, middle + j, 6, t + j, 6);
        for (int p = 0; p < POINTS; p++) *(Numbers *)(outs + p * apart + row * channels + at) = t[p];
        *(Numbers *)(bias + at) += sum;
    }
}

/* Where the numbers of one tile lie: in the picture that goes in, and in what comes out. */
INLINE void NAME(find)(const Conv *c, const int side, const long tile, float *x, float *outside_x, float **in, float *y,
                       float *outside_y, float **out) {
    const long across = tile % c->tiles_across, down = tile / c->tiles_across % c->tiles_down, step = 7 - side;
    const long picture = tile / (c->tiles_across * c->tiles_down);
    places(6, x + picture * c->height * c->width * c->in, outside_x, c->height, c->width, c->in,
           down * step - c->padding, across * step - c->padding, in);
    places(7 - side, y + picture * c->down * c->across * c->out, outside_y, c->down, c->across, c->out, down * step,
           across * step, out);
}

INLINE void NAME(forth_of)(const Conv *c, const int side) {
    const long kernels = c->in * c->out + APART, ins = BLOCK * c->in + APART, outs = BLOCK * c->out + APART;
    const long tiles = c->pictures * c->tiles_down * c->tiles_across;
    NAME(kernels_enter)(side, c->weight, c->in * c->out, c->kernels);
    float *to[BLOCK][16], *from[POINTS];
    for (long first = 0; first < tiles; first += BLOCK) {
        const long count = tiles - first < BLOCK ? tiles - first : BLOCK;
        for (long i = 0; i < count; i++) {
            NAME(find)(c, side, first + i, (float *)c->x, c->nothing, from, c->y, c->nowhere, to[i]);
            NAME(tile_enters)(from, c->in, c->ins, ins, i);
        }
        for (int p = 0; p < POINTS; p++)
            NAME(multiply)(count, c->out, c->in, c->ins + p * ins, c->in, 1, c->kernels + p * kernels,
                           c->outs + p * outs, 0);
        for (long i = 0; i < count; i++) NAME(result_leaves)(7 - side, to[i], c->out, c->outs, outs, i, c->bias);
    }
}

INLINE void NAME(back_of)(const Conv *c, const int side) {
    const long kernels = c->in * c->out + APART, ins = BLOCK * c->in + APART, outs = BLOCK * c->out + APART;
    const long tiles = c->pictures * c->tiles_down * c->tiles_across;
    memset(c->bias_slopes, 0, (size_t)c->out * sizeof(float));
    memset(c->kernel_slopes, 0, POINTS * (size_t)kernels * sizeof(float));
    if (c->x_slopes) {
        memset(c->x_slopes, 0, (size_t)(c->pictures * c->height * c->width * c->in) * sizeof(float));
        NAME(kernels_enter)(side, c->weight, c->in * c->out, c->kernels);
    }
    float *from[POINTS], *given[16], *to[BLOCK][POINTS];
    for (long first = 0; first < tiles; first += BLOCK) {
        const long count = tiles - first < BLOCK ? tiles - first : BLOCK;
        for (long i = 0; i < count; i++) {
            NAME(find)(c, side, first + i, (float *)c->x, c->nothing, from, (float *)c->gradient, c->nothing, given);
            NAME(tile_enters)(from, c->in, c->ins, ins, i);
            NAME(result_enters)(7 - side, given, c->out, c->outs, outs, i, c->bias_slopes);
            for (int p = 0; c->x_slopes && p < POINTS; p++)
                to[i][p] = from[p] == c->nothing ? c->nowhere : c->x_slopes + (from[p] - c->x);
        }
        for (int p = 0; p < POINTS; p++) {
            NAME(multiply)(c->in, c->out, count, c->ins + p * ins, 1, c->in, c->outs + p * outs,
                           c->kernel_slopes + p * kernels, 1);
            if (c->x_slopes)
                NAME(multiply)(count, c->in, c->out, c->outs + p * outs, c->out, 1, c->kernels + p * kernels,
                               c->ins + p * ins, 0);
        }
        for (long i = 0; c->x_slopes && i < count; i++) NAME(tile_leaves)(to[i], c->in, c->ins, ins, i);
    }
    NAME(kernels_leave)(side, c->kernel_slopes, c->in * c->out, c->weight_slopes);
}

static void NAME(forth)(const Conv *c) { c->side == 3 ? NAME(forth_of)(c, 3) : NAME(forth_of)(c, 5); }

static void NAME(back)(const Conv *c) { c->side == 3 ? NAME(back_of)(c, 3) : NAME(back_of)(c, 5); }

#undef Numbers
