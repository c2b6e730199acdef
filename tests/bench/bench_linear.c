/* bench_linear: what a weight costs in every number format: its bytes, the time to load it, and linear layers of few and of
 * many rows.
 *
 *     bench_linear [isa [threads [outputs columns]]]
 *
 * One matrix of random codes, by default larger than the caches, in each format that model files hold, and BF16 as W8. Per
 * figure: the best of some repetitions, on an otherwise quiet machine. */
#define _GNU_SOURCE
#include "kern_cpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_ROWS = 64, REPEATS = 5 };

struct kind {
    const char *name;
    enum quant_format format;
    enum kern_weights how;
    enum quant_format scales; /* beside the codes, where col_block is not 0 */
    uint64_t row_block, col_block;
};

static const struct kind kinds[] = {
    {"Q4_1", QUANT_Q4_1, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"Q4_K", QUANT_Q4_K, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"Q6_K", QUANT_Q6_K, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"Q8_0", QUANT_Q8_0, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"NVFP4", QUANT_NVFP4, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"NVFP4 pairs", QUANT_FP4_PAIRS, KERN_WEIGHTS_NATIVE, QUANT_FP8, 1, 16},
    {"MXFP4", QUANT_MXFP4, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"FP8 128x128", QUANT_FP8, KERN_WEIGHTS_NATIVE, QUANT_BF16, 128, 128},
    {"BF16", QUANT_BF16, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"F16", QUANT_F16, KERN_WEIGHTS_NATIVE, 0, 0, 0},
    {"W8", QUANT_BF16, KERN_WEIGHTS_W8, 0, 0, 0},
};

static uint64_t seed = 1;

static uint32_t random_next(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(seed >> 33);
}

static void *allocate(size_t n_bytes)
{
    void *p = malloc(n_bytes);
    if (p) return p;
    fprintf(stderr, "bench_linear: out of memory\n");
    exit(1);
}

/* n random bytes. Factors, wherever they lie, become small and positive, codes no NaN: no arithmetic is slower for them. */
static uint8_t *random_codes(enum quant_format f, size_t n)
{
    uint8_t *bytes = allocate(n);
    const size_t block = quant_block_bytes(f);
    for (size_t i = 0; i < n; i++) bytes[i] = (uint8_t)(random_next() & (f == QUANT_FP8 ? 0xf7 : 0xff));
    for (size_t i = 0; block > 1 && i < n; i += block) {
        if (f == QUANT_BF16) bytes[i + 1] = (uint8_t)(0x3c | (bytes[i + 1] & 0x80));
        if (f == QUANT_Q6_K) bytes[i + 209] = 0x20;
        for (size_t j = 0; j < 4 && f != QUANT_BF16 && j < block; j++) bytes[i + j] = 0x20;
    }
    return bytes;
}

static double since(int64_t start_us) { return (double)(clock_now_us() - start_us); }

static void bench_kind(struct kern *k, const struct kind *kind, int outputs, int columns, const float *x, float *y)
{
    const uint64_t rows = (uint64_t)outputs, cols = (uint64_t)columns;
    const double values = (double)outputs * columns;
    struct err e = {0};
    char text[1024];
    size_t row_bytes = 0;
    if (!quant_row_bytes(kind->format, cols, &row_bytes)) return;
    uint8_t *codes = random_codes(kind->format, row_bytes * (size_t)rows), *scales = NULL;
    struct quant_matrix m = {.format = kind->format, .rows = rows, .cols = cols, .bytes = codes, .global = 1.5f};
    if (kind->col_block) {
        m.scales = (struct quant_scales){NULL, kind->scales, kind->row_block, kind->col_block, 0};
        m.scales.per_row = (cols + kind->col_block - 1) / kind->col_block;
        const size_t n = (size_t)((rows + kind->row_block - 1) / kind->row_block * m.scales.per_row) * 2;
        m.scales.bytes = scales = memset(allocate(n), 0x3c, n);
    }
    const struct kern_span all_rows = {0, rows}, all_cols = {0, cols};
    const struct kern_weight_part part = {.matrix = m, .rows = &all_rows, .n_rows = 1, .cols = &all_cols, .n_cols = 1};
    struct kern_weight *w;
    const int64_t start = clock_now_us();
    if (k->weight_load(k, &part, 1, kind->how, KERN_ROWS, &w, &e) != RC_OK) {
        fprintf(stderr, "bench_linear: %s\n", err_format(&e, text, sizeof text));
        exit(1);
    }
    printf("%-12s %6.4f %7.2f", kind->name, (double)k->weight_bytes(w) / values, since(start) * 1e3 / values);
    static const int counts[] = {1, 2, 4, 8, MOST_ROWS};
    for (int i = 0; i < 5; i++) {
        double best = 1e12;
        for (int repeat = 0; repeat < REPEATS; repeat++) {
            const int64_t from = clock_now_us();
            k->linear(k, w, counts[i] == MOST_ROWS ? (struct kern_split){0, counts[i]} : (struct kern_split){counts[i], 0}, x, y);
            if (since(from) < best) best = since(from);
        }
        printf(" %8.2f", counts[i] * values / best * 1e-3);
    }
    printf("\n");
    k->weight_free(k, w);
    free(codes);
    free(scales);
}

int main(int argc, char **argv)
{
    const char *isa = argc > 1 ? argv[1] : "auto";
    const int threads = argc > 2 ? atoi(argv[2]) : 1;
    const int outputs = argc > 4 ? atoi(argv[3]) : 4096, columns = argc > 4 ? atoi(argv[4]) : 5120;
    struct kern *k;
    struct err e = {0};
    char text[1024];
    if (kern_cpu_open(isa, threads, &k, &e) != RC_OK || outputs < 1 || columns < 1) {
        fprintf(stderr, "bench_linear: %s\n", e.text[0] ? err_format(&e, text, sizeof text) : "bad shape");
        return 1;
    }
    float *x = allocate((size_t)columns * MOST_ROWS * sizeof *x), *y = allocate((size_t)outputs * MOST_ROWS * sizeof *y);
    for (size_t i = 0; i < (size_t)columns * MOST_ROWS; i++) x[i] = (float)random_next() * 0x1p-31f - 0.5f;
    printf("%s, %d threads, %d x %d: bytes and load nanoseconds a weight, then 10^9 products a second\n", k->numerics, threads,
           outputs, columns);
    printf("%-12s %6s %7s %8s %8s %8s %8s %8s\n", "format", "bytes", "load", "1 row", "2", "4", "8", "prompt");
    for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) bench_kind(k, &kinds[i], outputs, columns, x, y);
    free(x);
    free(y);
    k->close(k);
    return 0;
}
