/* Cut models: a window decodes to what the whole matrix does, whatever the format; a folder that was cut answers as its source,
 * bit for bit; what is damaged, foreign or cut for others is refused, and writing stops cleanly where it cannot go on. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine_group.h"
#include "mapped_file.h"
#include "model_config.h"
#include "model_shard.h"
#include "model_shard_write.h"
#include "shard_slice.h"
#include "tiny_gguf.h"

static char scratch[64];

static int setup(void **state)
{
    (void)state;
    snprintf(scratch, sizeof scratch, "/tmp/tandem-shard-XXXXXX");
    return mkdtemp(scratch) ? 0 : -1;
}

static void remove_folder(const char *path)
{
    char file[600];
    DIR *dir = opendir(path);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        snprintf(file, sizeof file, "%s/%s", path, entry->d_name);
        if (unlink(file)) remove_folder(file);
    }
    if (dir) closedir(dir);
    rmdir(path);
}

static int teardown(void **state)
{
    (void)state;
    remove_folder(scratch);
    return 0;
}

static const char *in_scratch(const char *name)
{
    static char paths[4][400];
    static int next;
    char *path = paths[next++ % 4];
    snprintf(path, sizeof paths[0], "%s/%s", scratch, name);
    return path;
}

/* ---- windows ---- */

struct bytes {
    unsigned char *at;
    size_t n;
};

static bool collect(void *ctx, const void *bytes, size_t n_bytes)
{
    struct bytes *b = ctx;
    memcpy(b->at + b->n, bytes, n_bytes);
    b->n += n_bytes;
    return true;
}

static uint64_t draw(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return *state >> 33;
}

enum { ROWS = 40, COLS = 1024 };

/* Random bytes are a good matrix of any format, NaN and all: comparisons are of bits. */
static struct quant_matrix random_matrix(enum quant_format f, int scales, unsigned char *codes, unsigned char *grid)
{
    uint64_t seed = (uint64_t)f * 77 + (uint64_t)scales;
    for (size_t i = 0; i < ROWS * COLS * 4; i++) codes[i] = (unsigned char)draw(&seed);
    for (size_t i = 0; i < ROWS * COLS; i++) grid[i] = (unsigned char)draw(&seed);
    struct quant_matrix m = {.format = f, .rows = ROWS, .cols = COLS, .bytes = codes, .global = 1.25f};
    if (f == QUANT_FP4_PAIRS)
        m.scales = scales ? (struct quant_scales){grid, QUANT_E8M0, 1, 32, COLS / 32} : (struct quant_scales){grid, QUANT_FP8, 1, 16, COLS / 16};
    if (f == QUANT_FP8 && scales == 0) m.scales = (struct quant_scales){grid, QUANT_BF16, 1, COLS, 1};
    if (f == QUANT_FP8 && scales == 1) m.scales = (struct quant_scales){grid, QUANT_F32, 128, 128, COLS / 128};
    if (f == QUANT_FP8 && scales == 2) m.scales = (struct quant_scales){grid, QUANT_F16, ROWS, COLS, 1};
    return m;
}

static void same_in_every_view(const struct quant_matrix *whole, const struct quant_matrix *part, uint64_t row, const struct kern_span *s)
{
    static float a[COLS], b[COLS], scales_a[COLS], scales_b[COLS], mins_a[COLS], mins_b[COLS];
    static int8_t codes_a[COLS], codes_b[COLS];
    const size_t n = (size_t)s->count, group = quant_matrix_group(whole);
    quant_matrix_decode(whole, row, s->first, n, a);
    quant_matrix_decode(part, row, s->first, n, b);
    assert_memory_equal(a, b, n * sizeof *a);
    memset(scales_a, 0, sizeof scales_a), memset(scales_b, 0, sizeof scales_b);
    quant_matrix_w8(whole, row, s->first, n, codes_a, scales_a);
    quant_matrix_w8(part, row, s->first, n, codes_b, scales_b);
    assert_memory_equal(codes_a, codes_b, n);
    assert_memory_equal(scales_a, scales_b, sizeof scales_a);
    if (whole->format == QUANT_FP8) {
        quant_matrix_fp8(whole, row, s->first, n, (uint8_t *)codes_a, scales_a);
        quant_matrix_fp8(part, row, s->first, n, (uint8_t *)codes_b, scales_b);
    } else if (group > 1 && s->first % group == 0 && n % group == 0) {
        quant_matrix_codes(whole, row, s->first, n, codes_a, scales_a, mins_a);
        quant_matrix_codes(part, row, s->first, n, codes_b, scales_b, mins_b);
        assert_memory_equal(mins_a, mins_b, n / group * sizeof *mins_a);
    }
    assert_memory_equal(codes_a, codes_b, n);
    assert_memory_equal(scales_a, scales_b, sizeof scales_a);
    if (quant_matrix_e2m1_scales(whole) == QUANT_FORMATS || s->first % group || n % group) return;
    quant_matrix_e2m1(whole, row, s->first, n, (uint8_t *)codes_a, (uint8_t *)scales_a);
    quant_matrix_e2m1(part, row, s->first, n, (uint8_t *)codes_b, (uint8_t *)scales_b);
    assert_memory_equal(codes_a, codes_b, n);
    assert_memory_equal(scales_a, scales_b, n / group);
}

static void windows_decode_as_the_whole(void **state)
{
    (void)state;
    static unsigned char codes[ROWS * COLS * 4], grid[ROWS * COLS], stored[ROWS * COLS * 4], stored_grid[ROWS * COLS];
    /* Rows out of order, as tiled heads are; columns on the narrowest cut, one span up to the end. */
    static const struct kern_span rows[] = {{30, 5}, {2, 1}, {3, 4}, {39, 1}}, all_rows[] = {{0, ROWS}};
    static const struct kern_span cols[] = {{544, 96}, {32, 32}, {992, 32}}, all_cols[] = {{0, COLS}};
    static const struct model_slice slices[] = {{rows, 4, all_cols, 1}, {all_rows, 1, cols, 3}, {rows, 4, cols, 3}};
    for (int f = 0; f < QUANT_E8M0; f++)
        for (int scales = 0; scales < (f == QUANT_FP8 ? 4 : f == QUANT_FP4_PAIRS ? 2 : 1); scales++)
            for (int i = 0; i < 3; i++) {
                const struct model_slice *s = &slices[i];
                const struct quant_matrix whole = random_matrix((enum quant_format)f, scales, codes, grid);
                struct quant_span spans[16];
                struct quant_window w = shard_window_of(&whole, s, spans);
                struct bytes to = {stored, 0}, to_grid = {stored_grid, 0};
                assert_true(shard_put_codes(&whole, &w, &(struct shard_sink){&to, collect}));
                assert_true(shard_put_scales(&whole, &w, &(struct shard_sink){&to_grid, collect}));
                assert_int_equal(to.n, shard_codes_bytes(&whole, &w));
                assert_int_equal(to_grid.n, shard_scales_bytes(&whole, &w));
                struct quant_matrix part = whole;
                part.bytes = stored;
                if (whole.scales.bytes) part.scales.bytes = stored_grid;
                part.window = &w;
                for (int j = 0; j < s->n_rows; j++)
                    for (int k = 0; k < s->n_cols; k++) {
                        const struct kern_span *r = &s->rows[j], *c = &s->cols[k];
                        assert_true(quant_matrix_holds(&part, (struct quant_span){r->first, r->count}, (struct quant_span){c->first, c->count}));
                        for (uint64_t row = r->first; row < r->first + r->count; row++) same_in_every_view(&whole, &part, row, c);
                    }
                const struct quant_span none = {0, 0};
                assert_false(quant_matrix_holds(&part, (struct quant_span){s->n_rows > 1 ? 29 : ROWS, 2}, none));
                assert_true(quant_matrix_holds(&part, none, (struct quant_span){32, 32}));
                if (s->n_cols > 1) assert_false(quant_matrix_holds(&part, none, (struct quant_span){0, COLS}));
                if (s->n_cols > 1) assert_false(quant_matrix_holds(&part, none, (struct quant_span){256, 32}) && f < QUANT_Q4_K);
            }
}

/* ---- folders ---- */

static size_t n_reported;
static void count_file(void *ctx, const char *name, size_t n_tensors, uint64_t n_bytes)
{
    (void)ctx, (void)name, (void)n_tensors, (void)n_bytes;
    n_reported++;
}
static const struct shard_report report = {NULL, count_file};

struct source {
    struct model_file *m;
    struct model_config c;
    struct partition p;
};

static struct source open_source(const char *model, int ranks)
{
    struct source s = {0};
    struct err e = {0};
    enum rc rc = model_file_open(model, &s.m, &e);
    if (rc == RC_OK) rc = model_config_read(s.m, &s.c, &e);
    if (rc == RC_OK) rc = partition_make(&s.c, ranks, PARTITION_FFN_STEP, &s.p, &e);
    if (rc != RC_OK) fail_msg("%s: %s", model, e.text);
    return s;
}

static enum rc cut(const char *model, int ranks, const char *folder, bool force, struct err *e)
{
    struct source s = open_source(model, ranks);
    enum rc rc = model_shard_write(s.m, &s.c, &s.p, folder, force, &report, e);
    model_file_close(s.m);
    return rc;
}

static enum rc verify(const char *model, int ranks, const char *folder, struct err *e)
{
    struct source s = open_source(model, ranks);
    enum rc rc = model_shard_verify(s.m, &s.p, folder, &report, e);
    model_file_close(s.m);
    return rc;
}

static void must_cut(const char *model, int ranks, const char *folder)
{
    struct err e = {0};
    if (cut(model, ranks, folder, false, &e) != RC_OK) fail_msg("%s: %s", model, e.text);
}

enum { N_REQUESTS = 2, PROMPT_TOKENS = 70, ANSWER_TOKENS = 24 };

static void run(const char *model, int ranks, enum kern_weights weights, struct engine_group_result *results)
{
    static int32_t prompts[N_REQUESTS][PROMPT_TOKENS];
    struct engine_request requests[N_REQUESTS];
    for (int i = 0; i < N_REQUESTS; i++) {
        struct sampling sampling = sampling_default();
        sampling.seed = 3 + (uint64_t)i;
        sampling.temperature = (float)i;
        for (int j = 0; j < PROMPT_TOKENS; j++) prompts[i][j] = (i * 11 + j * j * 5 + j) % 250;
        requests[i] = (struct engine_request){.id = 1 + (uint64_t)i, .prompt = prompts[i], .prompt_tokens = PROMPT_TOKENS,
                                              .max_tokens = ANSWER_TOKENS, .sampling = sampling, .ignore_end = true};
    }
    struct engine_group g = {.options = {.model_path = model, .ranks = ranks, .active = 2, .context = 256, .trace = true, .weights = weights},
                             .isa = "auto", .threads = 1, .bounds = lockstep_bounds_default()};
    if (!engine_group_run(&g, requests, N_REQUESTS, results)) fail_msg("%s: %s %s", model, g.err[0].text, g.err[1].text);
}

static void answers_as_its_source(const char *model, const char *folder, int ranks)
{
    struct err e = {0};
    must_cut(model, ranks, folder);
    n_reported = 0;
    if (verify(model, ranks, folder, &e) != RC_OK) fail_msg("%s: %s", model, e.text);
    assert_true(n_reported >= 2 + (size_t)ranks);
    for (int w = KERN_WEIGHTS_NATIVE; w <= KERN_WEIGHTS_W8; w++) {
        struct engine_group_result a[N_REQUESTS], b[N_REQUESTS];
        run(model, ranks, (enum kern_weights)w, a);
        run(folder, ranks, (enum kern_weights)w, b);
        for (int i = 0; i < N_REQUESTS; i++) {
            assert_int_equal(a[i].n_tokens, ANSWER_TOKENS);
            assert_int_equal(b[i].n_tokens, ANSWER_TOKENS);
            assert_memory_equal(a[i].tokens, b[i].tokens, ANSWER_TOKENS * sizeof *a[i].tokens);
            assert_memory_equal(a[i].trace, b[i].trace, ANSWER_TOKENS * 2 * sizeof *a[i].trace);
            assert_string_equal(a[i].text, b[i].text);
        }
        engine_group_free(a, N_REQUESTS);
        engine_group_free(b, N_REQUESTS);
    }
}

static void hybrid_of_mixed_formats(void **state)
{
    (void)state;
    answers_as_its_source("synth:tiny-hybrid-mixed", in_scratch("mixed"), 2);
}

static void gguf_on_more_ranks_than_it_has_even_shares(void **state)
{
    (void)state;
    static const enum quant_format formats[] = {QUANT_Q4_1, QUANT_F16};
    for (size_t i = 0; i < 2; i++) {
        struct tiny_gguf t = tiny_gguf_default();
        char gguf[400], folder[16];
        snprintf(gguf, sizeof gguf, "%s/tiny-%zu.gguf", scratch, i);
        snprintf(folder, sizeof folder, "gguf-%zu", i);
        t.matrices = formats[i];
        assert_true(tiny_gguf_write(&t, gguf));
        answers_as_its_source(gguf, in_scratch(folder), i ? 3 : 2);
    }
}

static void identity_is_the_sources(void **state)
{
    (void)state;
    struct model_file *a = NULL, *b = NULL;
    char digest_a[65], digest_b[65];
    must_cut("synth:tiny-hybrid:5", 2, in_scratch("identity"));
    assert_int_equal(model_file_open("synth:tiny-hybrid:5", &a, NULL), RC_OK);
    assert_int_equal(model_file_open_rank(in_scratch("identity"), 1, 2, &b, NULL), RC_OK);
    assert_int_equal(model_file_digest(a, digest_a, NULL), RC_OK);
    assert_int_equal(model_file_digest(b, digest_b, NULL), RC_OK);
    assert_string_equal(digest_a, digest_b);
    assert_true(model_file_synthetic(b));
    assert_int_equal(model_file_tensor_count(a), model_file_tensor_count(b));
    model_file_close(a);
    model_file_close(b);
}

/* ---- refusals ---- */

static void write_file(const char *folder, const char *name, const struct buf *text)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int fd = open(path, O_WRONLY | O_TRUNC);
    assert_true(fd >= 0 && fd_write_all(fd, text->data, text->len) && !close(fd));
}

static void read_file(const char *folder, const char *name, struct buf *out)
{
    char path[600];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(file_read(path, 1 << 26, out, NULL), RC_OK);
}

/* Replaces the first `from` in a file by `to` of the same length. */
static void tamper(const char *folder, const char *name, const char *from, const char *to)
{
    struct buf text = {0};
    read_file(folder, name, &text);
    char *at = memmem(text.data, text.len, from, strlen(from));
    assert_non_null(at);
    assert_int_equal(strlen(from), strlen(to));
    memcpy(at, to, strlen(to));
    write_file(folder, name, &text);
    buf_free(&text);
}

static void refused(const char *folder, int rank, int ranks, const char *code, const char *file)
{
    struct model_file *m = NULL;
    struct err e = {0};
    enum rc rc = model_file_open_rank(folder, rank, ranks, &m, &e);
    if (rc == RC_OK) {
        char digest[65];
        rc = model_file_digest(m, digest, &e);
    }
    model_file_close(m);
    assert_int_equal(rc, RC_BAD_INPUT);
    assert_string_equal(e.code, code);
    assert_true(!strcmp(code, "cannot_open") || e.exit_status == EXIT_UNAVAILABLE);
    if (file && !strstr(e.source, file)) fail_msg("%s: found in %s, expected %s: %s", code, e.source, file, e.text);
}

static void damage_is_refused(void **state)
{
    (void)state;
    static const struct {
        const char *file, *from, *to, *code;
        const char *source; /* where the error is found */
    } damages[] = {
        {"shard.json", "\"tandem shard\"", "\"tandem shirt\"", "shard_bad", "shard.json"},
        {"shard.json", "\"version\": 1", "\"version\": 2", "shard_version", "shard.json"},
        {"shard.json", "\"ranks\": 2", "\"ranks\": 9", "shard_bad", "shard.json"},
        {"shard.json", "\"ranks\": 2", "\"ranks\": 3", "shard_ranks", "shard.json"},
        {"shard.json", "rank-1-of-2", "rank-3-of-2", "shard_bad", "shard.json"},
        {"shard.json", "\"config.json\"", "\"conf/g.json\"", "shard_bad", "shard.json"},
        {"config.json", "\"hidden_size\": 64", "\"hidden_size\": 65", "shard_foreign", "shard.json"},
        {"generation_config.json", "299", "298", "shard_foreign", "shard.json"},
        {"rank-1-of-2.safetensors", "\\\"version\\\":1", "\\\"version\\\":2", "shard_version", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"rank\\\":1", "\\\"rank\\\":0", "shard_foreign", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"ranks\\\":2", "\\\"ranks\\\":4", "shard_foreign", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"format\\\":\\\"F32\\\"", "\\\"format\\\":\\\"F16\\\"", "shard_bad_tensor", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"rows\\\":[[160,160]]", "\\\"rows\\\":[[161,160]]", "shard_bad_tensor", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"rows\\\":[[160,160]]", "\\\"rows\\\":[[160,150]]", "shard_bad_tensor", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"dims\\\":[64,320]", "\\\"dims\\\":[64,319]", "shard_bad_tensor", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "\\\"name\\\":\\\"lm_head", "\\\"name\\\":\\\"lm_hand", "shard_bad_tensor", "rank-1-of-2"},
        {"rank-1-of-2.safetensors", "tandem_shard", "tandem_shirt", "shard_bad", "rank-1-of-2"},
        {"common.safetensors", "\\\"rank\\\":-1", "\\\"rank\\\":+1", "json_invalid", "common"},
        {"common.safetensors", "\\\"partition\\\":\\\"", "\\\"partitian\\\":\\\"", "shard_bad", "common"},
    };
    const char *folder = in_scratch("damage");
    must_cut("synth:tiny-hybrid", 2, folder);
    for (size_t i = 0; i < sizeof damages / sizeof *damages; i++) {
        struct buf good = {0};
        read_file(folder, damages[i].file, &good);
        tamper(folder, damages[i].file, damages[i].from, damages[i].to);
        refused(folder, 1, 2, damages[i].code, damages[i].source);
        write_file(folder, damages[i].file, &good);
        buf_free(&good);
    }
    struct model_file *m = NULL;
    assert_int_equal(model_file_open_rank(folder, 1, 2, &m, NULL), RC_OK);
    model_file_close(m);
}

static void files_of_others_are_refused(void **state)
{
    (void)state;
    char a[400], b[400];
    struct err e = {0};
    const char *folder = in_scratch("own"), *other = in_scratch("other");
    must_cut("synth:tiny-hybrid", 2, folder);
    must_cut("synth:tiny-hybrid:2", 2, other);
    refused(folder, 0, 3, "shard_ranks", "shard.json");
    snprintf(a, sizeof a, "%s/rank-1-of-2.safetensors", other);
    snprintf(b, sizeof b, "%s/rank-1-of-2.safetensors", folder);
    assert_int_equal(rename(a, b), 0);
    refused(folder, 1, 2, "shard_foreign", "rank-1-of-2");
    refused(other, 1, 2, "cannot_open", NULL);
    /* Rank 0 reads no file of rank 1. */
    struct model_file *m = NULL;
    assert_int_equal(model_file_open_rank(other, 0, 2, &m, NULL), RC_OK);
    model_file_close(m);
    assert_int_equal(truncate(b, 1000), 0);
    refused(folder, 1, 2, "shard_truncated", "rank-1-of-2");
    snprintf(a, sizeof a, "%s/generation_config.json", other);
    assert_int_equal(unlink(a), 0);
    refused(other, 0, 2, "shard_foreign", "shard.json");
    assert_int_equal(verify("synth:tiny-hybrid", 2, other, &e), RC_BAD_INPUT);
}

static void replace_byte(const char *folder, const char *name, off_t from_end)
{
    char path[600];
    unsigned char byte;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    const int fd = open(path, O_RDWR);
    const off_t at = fd < 0 ? -1 : lseek(fd, -from_end, SEEK_END);
    assert_true(at > 0 && pread(fd, &byte, 1, at) == 1);
    byte ^= 1;
    assert_true(pwrite(fd, &byte, 1, at) == 1 && !close(fd));
}

static void file_hash(const char *folder, const char *name, char hex[65])
{
    struct buf text = {0};
    read_file(folder, name, &text);
    mapped_file_digest_bytes(text.data, text.len, hex);
    buf_free(&text);
}

/* A byte of the weights: opening sees it when the digest is asked for, and so does verify. */
static void rotten_bytes_are_found(void **state)
{
    (void)state;
    const char *folder = in_scratch("rotten");
    struct err e = {0};
    must_cut("synth:tiny-hybrid", 2, folder);
    replace_byte(folder, "rank-1-of-2.safetensors", 5);
    refused(folder, 1, 2, "shard_damaged", "rank-1-of-2");
    assert_int_equal(verify("synth:tiny-hybrid", 2, folder, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_UNAVAILABLE);
}

/* Other bytes under a hash that was made to fit them: what only a comparison with the source can see. */
static void verify_compares_bytes(void **state)
{
    (void)state;
    const char *folder = in_scratch("forged"), *name = "rank-0-of-2.safetensors";
    char before[65], after[65];
    struct err e = {0};
    must_cut("synth:tiny-hybrid-mixed", 2, folder);
    for (int i = 0; i < 2; i++) { /* the last tensor's codes, then nothing but its scales */
        file_hash(folder, name, before);
        replace_byte(folder, name, i ? 1 : 3000);
        file_hash(folder, name, after);
        tamper(folder, "shard.json", before, after);
        e = (struct err){0};
        assert_int_equal(verify("synth:tiny-hybrid-mixed", 2, folder, &e), RC_BAD_INPUT);
        assert_string_equal(e.code, "shard_differs");
        assert_non_null(strstr(e.text, "bytes"));
        replace_byte(folder, name, i ? 1 : 3000);
        tamper(folder, "shard.json", after, before);
        assert_int_equal(verify("synth:tiny-hybrid-mixed", 2, folder, NULL), RC_OK);
    }
}

/* A partition with a gap cuts a folder that agrees with itself; rows, or columns, are then in no file. */
static void verify_misses_what_is_left_out(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct source s = open_source("synth:tiny-hybrid", 2);
        struct err e = {0};
        const char *folder = in_scratch(i ? "gap-columns" : "gap-rows");
        if (i) s.p.part[1].q_heads.count = 0; /* columns of o, rows of q */
        else s.p.part[0].vocab.count -= 16;
        assert_int_equal(model_shard_write(s.m, &s.c, &s.p, folder, false, &report, NULL), RC_OK);
        assert_int_equal(model_shard_verify(s.m, &s.p, folder, &report, &e), RC_BAD_INPUT);
        assert_string_equal(e.code, "shard_differs");
        assert_non_null(strstr(e.text, "not there as a whole"));
        model_file_close(s.m);
    }
}

/* One tensor Q8_0 of 288 columns and 4 rows in the file of rank 0. */
static enum rc read_spans(const char *rows, const char *cols, size_t n_bytes)
{
    static const char identity[] = "\"version\":1,\"ranks\":2,\"partition\":\"0123456789abcdef\",\"source_digest\":"
                                   "\"0000000000000000000000000000000000000000000000000000000000000000\"";
    struct model_shard s = {0};
    struct buf index = {0}, own = {0}, file = {0};
    struct err e = {0};
    buf_printf(&index, "{%s,\"format\":\"tandem shard\",\"layout\":\"hf\",\"synthetic\":false,\"source\":\"m\",\"files\":[{\"name\":"
               "\"x\",\"bytes\":1,\"sha256\":\"%064d\"}]}", identity, 0);
    buf_printf(&own, "{%s,\"rank\":0,\"tensors\":[{\"name\":\"t\",\"format\":\"Q8_0\",\"dims\":[288,4],\"rows\":%s,\"cols\":%s,"
               "\"xxh3\":\"0123456789abcdef\"}]}", identity, rows, cols);
    uint64_t len = 0;
    buf_append(&file, &len, sizeof len);
    buf_printf(&file, "{\"__metadata__\":{\"tandem_shard\":\"");
    for (size_t i = 0; i < own.len; i++) buf_printf(&file, own.data[i] == '"' ? "\\%c" : "%c", own.data[i]);
    buf_printf(&file, "\"},\"t\":{\"dtype\":\"U8\",\"shape\":[%zu],\"data_offsets\":[0,%zu]}}", n_bytes, n_bytes);
    len = file.len - sizeof len;
    memcpy(file.data, &len, sizeof len);
    for (size_t i = 0; i < n_bytes; i++) buf_append(&file, "", 1);
    assert_int_equal(model_shard_read_index(index.data, index.len, "shard.json", &s, &e), RC_OK);
    enum rc rc = model_shard_read_tensors(file.data, file.len, "rank-0", 0, &s, &e);
    if (rc != RC_OK) assert_string_equal(e.code, "shard_bad_tensor");
    model_shard_free(&s);
    buf_free(&index), buf_free(&own), buf_free(&file);
    return rc;
}

static void spans_are_checked(void **state)
{
    (void)state;
    enum { BLOCK = 34 };
    assert_int_equal(read_spans("[[0,4]]", "[[0,128]]", 4 * 4 * BLOCK), RC_OK);
    assert_int_equal(read_spans("[[1,1],[3,1]]", "[[128,160]]", 2 * 5 * BLOCK), RC_OK);
    assert_int_equal(read_spans("[]", "[[0,288]]", 0), RC_OK);
    static const struct {
        const char *rows, *cols;
        size_t blocks;
    } wrong[] = {
        {"[[0,4]]", "[[160,128]]", 16},         {"[[0,4]]", "[[32,96]]", 12},
        {"[[0,4]]", "[[32,128]]", 16},          {"[[0,4]]", "[[0,64]]", 8},          {"[[0,4]]", "[[256,64]]", 8},
        {"[[0,4]]", "[[128,128],[0,128]]", 32}, {"[[0,2],[1,2]]", "[[0,128]]", 16},  {"[[0,2],[2,2]]", "[[0,128]]", 16},
        {"[[3,2]]", "[[0,128]]", 8},            {"[[4,1]]", "[[0,128]]", 4},         {"[[0,0]]", "[[0,128]]", 0},
        {"[[-1,1]]", "[[0,128]]", 4},           {"[[0,1,1]]", "[[0,128]]", 4},       {"{}", "[[0,128]]", 0},
        {"[[0,4]]", "[[0,128]]", 15},           {"[[0,9223372036854775807]]", "[[0,128]]", 16},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        if (read_spans(wrong[i].rows, wrong[i].cols, wrong[i].blocks * BLOCK) == RC_OK) fail_msg("accepted: %s %s", wrong[i].rows, wrong[i].cols);
}

/* The same cut under another seed is well made, but not this model's. */
static void verify_wants_its_own_source(void **state)
{
    (void)state;
    struct err e = {0};
    must_cut("synth:tiny-hybrid:9", 2, in_scratch("nine"));
    assert_int_equal(verify("synth:tiny-hybrid:8", 2, in_scratch("nine"), &e), RC_BAD_INPUT);
    assert_string_equal(e.code, "shard_differs");
    e = (struct err){0};
    assert_int_equal(verify(in_scratch("nine"), 2, in_scratch("nine"), &e), RC_BAD_INPUT);
    assert_string_equal(e.code, "shard_of_shard");
}

/* ---- writing ---- */

static void folders_are_not_overwritten(void **state)
{
    (void)state;
    const char *folder = in_scratch("taken");
    char other[500];
    struct err e = {0};
    struct stat st;
    must_cut("synth:tiny-hybrid", 3, folder);
    assert_int_equal(cut("synth:tiny-hybrid:2", 2, folder, false, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_NO_OUTPUT);
    assert_int_equal(verify("synth:tiny-hybrid", 3, folder, NULL), RC_OK);
    assert_int_equal(cut("synth:tiny-hybrid:2", 2, folder, true, NULL), RC_OK);
    assert_int_equal(verify("synth:tiny-hybrid:2", 2, folder, NULL), RC_OK);
    snprintf(other, sizeof other, "%s/rank-2-of-3.safetensors", folder);
    assert_int_not_equal(stat(other, &st), 0);
    /* What is no cut stays, force or not. */
    snprintf(other, sizeof other, "%s/mine", in_scratch("foreign"));
    assert_int_equal(mkdir(in_scratch("foreign"), 0700), 0);
    assert_int_equal(mkdir(other, 0700), 0);
    e = (struct err){0};
    assert_int_equal(cut("synth:tiny-hybrid", 2, in_scratch("foreign"), true, &e), RC_BAD_INPUT);
    assert_int_equal(e.exit_status, EXIT_NO_OUTPUT);
    assert_int_equal(stat(other, &st), 0);
}

/* As a full disk would: the error says so, nothing half-made stays, and the folder is no model. */
static void a_full_disk_is_an_io_error(void **state)
{
    (void)state;
    const char *folder = in_scratch("full");
    struct rlimit old, small;
    struct err e = {0};
    getrlimit(RLIMIT_FSIZE, &old);
    small = old;
    small.rlim_cur = 150000;
    signal(SIGXFSZ, SIG_IGN);
    setrlimit(RLIMIT_FSIZE, &small);
    enum rc rc = cut("synth:tiny-hybrid", 2, folder, false, &e);
    setrlimit(RLIMIT_FSIZE, &old);
    assert_int_equal(rc, RC_FAILED);
    assert_int_equal(e.exit_status, EXIT_IO);
    DIR *dir = opendir(folder);
    for (struct dirent *entry; dir && (entry = readdir(dir));) {
        assert_null(strstr(entry->d_name, ".part"));
        assert_string_not_equal(entry->d_name, "shard.json");
    }
    closedir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(windows_decode_as_the_whole),
        cmocka_unit_test(hybrid_of_mixed_formats),
        cmocka_unit_test(gguf_on_more_ranks_than_it_has_even_shares),
        cmocka_unit_test(identity_is_the_sources),
        cmocka_unit_test(damage_is_refused),
        cmocka_unit_test(files_of_others_are_refused),
        cmocka_unit_test(rotten_bytes_are_found),
        cmocka_unit_test(spans_are_checked),
        cmocka_unit_test(verify_compares_bytes),
        cmocka_unit_test(verify_misses_what_is_left_out),
        cmocka_unit_test(verify_wants_its_own_source),
        cmocka_unit_test(folders_are_not_overwritten),
        cmocka_unit_test(a_full_disk_is_an_io_error),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
