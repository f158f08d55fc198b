/* Dropout's masks as torch draws them: `bernoulli_` takes 53 bits of its Mersenne Twister a number (Matsumoto and
   Nishimura, 1998). Included for each instruction set, as the loops are made of vectors by the compiler. */

/* The next numbers of the twister, as 53 bits each. */
static void NAME(twist)(Twister *t) {
    uint32_t *s = t->state;
    const int n = TWISTER, m = 397;
#define NEXT(i, after, far) s[far] ^ (((s[i] & 0x80000000u) | (s[after] & 0x7fffffffu)) >> 1) ^ (-(s[after] & 1) & 0x9908b0dfu)
    for (int i = 0; i < n - m; i++) s[i] = NEXT(i, i + 1, i + m);
    for (int i = n - m; i < n - 1; i++) s[i] = NEXT(i, i + 1, i + m - n);
    s[n - 1] = NEXT(n - 1, 0, m - 1);
#undef NEXT
    for (int i = 0; i < n / 2; i++) {
        uint32_t high = s[2 * i], low = s[2 * i + 1];
#define TEMPER(y) (y ^= y >> 11, y ^= y << 7 & 0x9d2c5680u, y ^= y << 15 & 0xefc60000u, y ^= y >> 18)
        TEMPER(high), TEMPER(low);
#undef TEMPER
        t->drawn[i] = (uint64_t)(high & 0x1fffff) << 32 | low;
    }
    t->used = 0;
}

/* Multiply numbers by `scale` with the probability `kept`, and otherwise by 0. */
static void NAME(drop)(Twister *t, double kept, float scale, float *numbers, long count) {
    const int64_t below = (int64_t)ceil(ldexp(kept, 53));
    while (count) {
        if (t->used == TWISTER / 2) NAME(twist)(t);
        const long some = count < TWISTER / 2 - t->used ? count : TWISTER / 2 - t->used;
        const int64_t *drawn = t->drawn + t->used;
        for (long i = 0; i < some; i++) numbers[i] *= drawn[i] < below ? scale : 0;
        t->used += some, numbers += some, count -= some;
    }
}
