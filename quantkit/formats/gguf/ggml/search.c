/* Searches for the scales of small blocks of weights, many blocks side by side.
 *
 * The arithmetic is that of ggml's quantizers (ggml-quants.c of https://github.com/ggml-org/ggml), float32 operation by
 * operation and in the same order inside each block, so that results are the same to the last bit; only the blocks lie
 * side by side. Compile with -ffp-contract=off: a fused multiply-add rounds once where ggml rounds twice.
 *
 * Values and weights are float32, one row of n (at most 32) for each block; codes are bytes of the same shape.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define LONGEST 32
#define NOTHING 1e-15f
#define WHOLE_LEAST -4194304.f
#define EACH for (int j = 0; j < LANES; ++j)

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FOR_EVERY_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#define INLINE static inline __attribute__((always_inline))
#else
#define FOR_EVERY_CPU
#define INLINE static inline
#endif

typedef float lanes[LANES];

/* The nearest whole number, ties to even, between least and top; what does not fit into 23 bits wraps as in ggml. */
INLINE float nearest(float value, float least, float top) {
    float shifted = value + 12582912.f;
    int32_t whole;
    memcpy(&whole, &shifted, sizeof whole);
    float whole_number = (float)((whole & 0x007fffff) - 0x00400000);
    whole_number = whole_number > top ? top : whole_number;
    return whole_number < least ? least : whole_number;
}

/* Blocks of rows become lanes of columns; the lanes past the last block repeat it. */
INLINE void turn(const float *rows, long have, int n, lanes *out) {
    for (int j = 0; j < LANES; ++j) {
        const float *row = rows + (j < have ? j : have - 1) * n;
        for (int i = 0; i < n; ++i) out[i][j] = row[i];
    }
}

INLINE void codes_of(lanes *x, int n, const float *inverse, const float *minimum, int top, lanes *codes) {
    for (int i = 0; i < n; ++i) EACH codes[i][j] = nearest(inverse[j] * (x[i][j] - minimum[j]), 0, top);
}

INLINE void error_of(lanes *x, lanes *w, lanes *codes, int n, const float *scale, const float *minimum, int absolute,
                     float *error) {
    lanes sum = {0};
    for (int i = 0; i < n; ++i) {
        if (absolute) {
            EACH sum[j] += w[i][j] * fabsf(scale[j] * codes[i][j] + minimum[j] - x[i][j]);
        } else {
            EACH {
                float off = scale[j] * codes[i][j] + minimum[j] - x[i][j];
                sum[j] += w[i][j] * (off * off);
            }
        }
    }
    memcpy(error, sum, sizeof sum);
}

/* value = scale * code - offset, codes 0 .. top. The start spans smallest to largest; then steps + 1 candidates
 * (first + step * k + top) / (largest - minimum) for 1 / scale, each refitted by least squares; the least weighted
 * error wins, of squares or of absolute values. */
INLINE void affine(lanes *x, lanes *w, lanes *codes, int n, int top, float first, float step, int steps, int absolute,
                   float *scale, float *offset, float *sum_w) {
    lanes largest, sum_x, smallest, minimum, inverse, best, best_inverse, best_from;
    EACH {
        smallest[j] = largest[j] = x[0][j];
        sum_w[j] = w[0][j];
        sum_x[j] = w[0][j] * x[0][j];
    }
    for (int i = 1; i < n; ++i) {
        EACH {
            smallest[j] = x[i][j] < smallest[j] ? x[i][j] : smallest[j];
            largest[j] = x[i][j] > largest[j] ? x[i][j] : largest[j];
            sum_w[j] += w[i][j];
            sum_x[j] += w[i][j] * x[i][j];
        }
    }
    EACH {
        smallest[j] = smallest[j] > 0.f ? 0.f : smallest[j];
        minimum[j] = best_from[j] = smallest[j];
        inverse[j] = best_inverse[j] = top / (largest[j] - smallest[j]);
        scale[j] = 1.f / inverse[j];
    }
    codes_of(x, n, inverse, minimum, top, codes);
    error_of(x, w, codes, n, scale, minimum, absolute, best);
    for (int k = 0; k <= steps; ++k) {
        lanes sum_l = {0}, sum_l2 = {0}, sum_xl = {0}, denominator, this_scale, this_minimum, error;
        EACH inverse[j] = (first + step * k + top) / (largest[j] - minimum[j]);
        for (int i = 0; i < n; ++i) {
            EACH {
                float l = nearest(inverse[j] * (x[i][j] - minimum[j]), 0, top), wl = w[i][j] * l;
                codes[i][j] = l;
                sum_l[j] += wl;
                sum_l2[j] += wl * l;
                sum_xl[j] += wl * x[i][j];
            }
        }
        EACH {
            denominator[j] = sum_w[j] * sum_l2[j] - sum_l[j] * sum_l[j];
            float slope = (sum_w[j] * sum_xl[j] - sum_x[j] * sum_l[j]) / denominator[j];
            float least = (sum_l2[j] * sum_x[j] - sum_l[j] * sum_xl[j]) / denominator[j];
            this_scale[j] = least > 0.f ? sum_xl[j] / sum_l2[j] : slope;
            this_minimum[j] = least > 0.f ? 0.f : least;
        }
        error_of(x, w, codes, n, this_scale, this_minimum, absolute, error);
        EACH {
            int better = (denominator[j] > 0.f) & (error[j] < best[j]);
            best[j] = better ? error[j] : best[j];
            best_inverse[j] = better ? inverse[j] : best_inverse[j];
            best_from[j] = better ? minimum[j] : best_from[j];
            scale[j] = better ? this_scale[j] : scale[j];
            minimum[j] = better ? this_minimum[j] : minimum[j];
        }
    }
    codes_of(x, n, best_inverse, best_from, top, codes);
    EACH {
        int flat = largest[j] <= smallest[j];
        scale[j] = flat ? 0.f : scale[j];
        offset[j] = -(flat ? smallest[j] : minimum[j]);
        inverse[j] = flat ? 0.f : 1.f;
    }
    for (int i = 0; i < n; ++i) EACH codes[i][j] = inverse[j] == 0.f ? 0.f : codes[i][j];
}

/* value = scale * (code - top), codes 0 .. 2 * top - 1: from the value of largest magnitude, then 18 neighbours. */
INLINE void symmetric(lanes *x, lanes *w, lanes *codes, int n, int top, float *scale) {
    lanes largest = {0}, extreme = {0}, best = {0}, best_inverse = {0}, inverse;
    for (int i = 0; i < n; ++i) {
        EACH {
            float size = fabsf(x[i][j]);
            extreme[j] = size > largest[j] ? x[i][j] : extreme[j];
            largest[j] = size > largest[j] ? size : largest[j];
        }
    }
    for (int k = -10; k <= 9; ++k) {
        lanes sum_lx = {0}, sum_l2 = {0};
        int start = k == -10; /* no neighbour yet */
        if (k == 0) continue;
        EACH inverse[j] = (start ? (float)-top : -(top + 0.1f * k)) / extreme[j];
        for (int i = 0; i < n; ++i) {
            EACH {
                float l = nearest(inverse[j] * x[i][j], (float)-top, (float)(top - 1));
                sum_lx[j] += w[i][j] * x[i][j] * l;
                sum_l2[j] += w[i][j] * l * l;
            }
        }
        EACH {
            float fit = sum_lx[j] / sum_l2[j];
            fit = start & (sum_l2[j] == 0.f) ? 0.f : fit;
            int better = start | ((sum_l2[j] > 0.f) & (sum_lx[j] * sum_lx[j] > best[j] * sum_l2[j]));
            scale[j] = better ? fit : scale[j];
            best[j] = better ? fit * sum_lx[j] : best[j];
            best_inverse[j] = better ? inverse[j] : best_inverse[j];
        }
    }
    for (int i = 0; i < n; ++i) {
        EACH {
            float l = nearest(best_inverse[j] * x[i][j], (float)-top, (float)(top - 1)) + top;
            codes[i][j] = largest[j] < NOTHING ? 0.f : l;
        }
    }
    EACH scale[j] = largest[j] < NOTHING ? 0.f : scale[j];
}

INLINE void give(lanes *codes, long have, int n, uint8_t *out) {
    for (int j = 0; j < have; ++j) {
        for (int i = 0; i < n; ++i) out[j * n + i] = (uint8_t)codes[i][j];
    }
}

/* Weights of errors, `columns` to a row: sqrt(mean of the run's squares) + |value|, or with an importance of each column
 * importance * sqrt(times * mean of the run's squares + value^2). `columns` is a multiple of `run`. */
FOR_EVERY_CPU
void error_weights(const float *values, const float *importance, long rows, long columns, int run, float times,
                   float *weights) {
    long runs = rows * columns / run;
    for (long first = 0; first < runs; first += 8) {
        long have = runs - first < 8 ? runs - first : 8;
        float sums[8] = {0};
        const float *x = values + first * run;
        for (int i = 0; i < run; ++i) {
            for (long j = 0; j < 8; ++j) {
                float value = x[(j < have ? j : 0) * run + i];
                sums[j] += value * value;
            }
        }
        for (long j = 0; j < have; ++j, x += run) {
            float *w = weights + (first + j) * run;
            if (importance) {
                const float *of = importance + (first + j) * run % columns;
                float spread = times * sums[j] / run;
                for (int i = 0; i < run; ++i) w[i] = of[i] * sqrtf(spread + x[i] * x[i]);
            } else {
                float spread = sqrtf(sums[j] / run);
                for (int i = 0; i < run; ++i) w[i] = spread + fabsf(x[i]);
            }
        }
    }
}

/* `sums` takes the sum of each block's weights. */
FOR_EVERY_CPU
void search_affine(const float *values, const float *weights, long blocks, int n, int top, float first, float step,
                   int steps, int absolute, float *scales, float *offsets, float *sums, uint8_t *codes_out) {
    for (long block = 0; block < blocks; block += LANES) {
        long have = blocks - block < LANES ? blocks - block : LANES;
        lanes x[LONGEST], w[LONGEST], codes[LONGEST], scale, offset, sum;
        turn(values + block * n, have, n, x);
        turn(weights + block * n, have, n, w);
        if (absolute) {
            affine(x, w, codes, n, top, first, step, steps, 1, scale, offset, sum);
        } else {
            affine(x, w, codes, n, top, first, step, steps, 0, scale, offset, sum);
        }
        give(codes, have, n, codes_out + block * n);
        memcpy(scales + block, scale, have * sizeof(float));
        memcpy(offsets + block, offset, have * sizeof(float));
        memcpy(sums + block, sum, have * sizeof(float));
    }
}

FOR_EVERY_CPU
void search_symmetric(const float *values, const float *weights, long blocks, int n, int top, float *scales,
                      float *sums, uint8_t *codes_out) {
    for (long block = 0; block < blocks; block += LANES) {
        long have = blocks - block < LANES ? blocks - block : LANES;
        lanes x[LONGEST], w[LONGEST], codes[LONGEST], scale, sum = {0};
        turn(values + block * n, have, n, x);
        turn(weights + block * n, have, n, w);
        symmetric(x, w, codes, n, top, scale);
        for (int i = 0; i < n; ++i) EACH sum[j] += w[i][j];
        give(codes, have, n, codes_out + block * n);
        memcpy(scales + block, scale, have * sizeof(float));
        memcpy(sums + block, sum, have * sizeof(float));
    }
}

/* value = scale * code, codes 0 .. top, of values that are not negative: nine scales, then up to five rounds that
 * move one code at a time. */
static float positive(const float *x, const float *w, int n, int top, uint8_t *codes) {
    float largest = 0.f, best = 0.f, sum_lx = 0.f, sum_l2 = 0.f;
    for (int i = 0; i < n; ++i) largest = largest > x[i] ? largest : x[i];
    for (int i = 0; i < n; ++i) codes[i] = 0;
    if (largest < NOTHING) return 0.f;
    float best_inverse = top / largest;
    for (int k = -5; k <= 4; ++k) {
        int start = k == -5;
        if (k == 0) continue;
        float inverse = start ? best_inverse : (0.1f * k + top) / largest, scale = 1.f / inverse, error = 0.f;
        for (int i = 0; i < n; ++i) {
            float off = x[i] - scale * nearest(inverse * x[i], WHOLE_LEAST, start ? 255.f : (float)top);
            error += w[i] * off * off;
        }
        if (start || error < best) {
            best = error;
            best_inverse = inverse;
        }
    }
    for (int i = 0; i < n; ++i) {
        float l = nearest(best_inverse * x[i], WHOLE_LEAST, (float)top);
        codes[i] = (uint8_t)l;
        sum_lx += w[i] * x[i] * l;
        sum_l2 += w[i] * l * l;
    }
    for (int round = 0, changed = 1; round < 5 && changed; ++round) {
        changed = 0;
        for (int i = 0; i < n; ++i) {
            float lx = sum_lx - w[i] * x[i] * codes[i], l2 = sum_l2 - w[i] * codes[i] * codes[i];
            if (!(lx > 0.f && l2 > 0.f)) continue;
            float l = nearest(x[i] * l2 / lx, WHOLE_LEAST, (float)top);
            if (l == codes[i]) continue;
            lx += w[i] * x[i] * l;
            l2 += w[i] * l * l;
            if (lx * lx * sum_l2 > sum_lx * sum_lx * l2) {
                codes[i] = (uint8_t)l;
                sum_lx = lx;
                sum_l2 = l2;
                changed = 1;
            }
        }
    }
    return sum_l2 > 0.f ? sum_lx / sum_l2 : 0.f;
}

void search_positive(const float *values, const float *weights, long blocks, int n, int top, float *scales,
                     uint8_t *codes) {
    for (long block = 0; block < blocks; ++block) {
        scales[block] = positive(values + block * n, weights + block * n, n, top, codes + block * n);
    }
}

/* Codes on given scales: the nearest (value + offset) / scale + zero in 0 .. top; where a scale is 0 they stay. */
FOR_EVERY_CPU
void round_codes(const float *values, const float *scales, const float *offsets, long blocks, int n, int zero, int top,
                 uint8_t *codes) {
    for (long block = 0; block < blocks; ++block) {
        float scale = scales[block], offset = offsets[block];
        if (scale == 0.f) continue;
        for (long i = block * n; i < block * n + n; ++i) {
            codes[i] = (uint8_t)(nearest((values[i] + offset) / scale, (float)-zero, (float)(top - zero)) + zero);
        }
    }
}
