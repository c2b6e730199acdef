/* prefix_fixture: what the tests of the prefix store share: a folder of their own, prompts of made-up ids, and blocks and
 * states whose every byte follows from the tokens before it, so that a byte of anything else is noticed. */
#ifndef TANDEM_PREFIX_FIXTURE_H
#define TANDEM_PREFIX_FIXTURE_H

#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "prefix_store.h"

enum { BLOCK_BYTES = 100, STATE_BYTES = 333, MAX_IDS = 16384 };

struct place {
    char base[64];   /* temporary folder */
    char folder[96]; /* base/cache */
};

static inline int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st, (void)type, (void)ftw;
    return remove(path);
}

static inline int setup(void **ctx)
{
    struct place *p = calloc(1, sizeof *p);
    if (!p) return -1;
    /* In memory where that can be: thousands of commits. */
    snprintf(p->base, sizeof p->base, "/dev/shm/test_prefix.XXXXXX");
    if (!mkdtemp(p->base)) {
        snprintf(p->base, sizeof p->base, "/tmp/test_prefix.XXXXXX");
        if (!mkdtemp(p->base)) return -1;
    }
    snprintf(p->folder, sizeof p->folder, "%s/cache", p->base);
    *ctx = p;
    return 0;
}

static inline int teardown(void **ctx)
{
    struct place *p = *ctx;
    nftw(p->base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(p);
    return 0;
}

static inline struct prefix_store_options options_of(const struct place *p)
{
    return (struct prefix_store_options){
        .folder = p->folder, .fingerprint = {{1, 2, 3}}, .block_bytes = BLOCK_BYTES, .state_bytes = STATE_BYTES};
}

/* o NULL: the usual ones. */
static inline struct prefix_store *open_good(const struct place *p, const struct prefix_store_options *o)
{
    struct err e = {0};
    struct prefix_store *s = NULL;
    struct prefix_store_options usual = options_of(p);
    if (prefix_store_open(o ? o : &usual, &s, &e) != RC_OK) fail_msg("%s: %s", e.code, e.text);
    return s;
}

/* ---- prompts ---- */

struct prompt_ids {
    int32_t ids[MAX_IDS];
    int n;
};

static inline struct prompt_ids ids_make(int seed, int n)
{
    static struct prompt_ids a;
    a.n = n;
    for (int i = 0; i < n; i++) a.ids[i] = (int32_t)(XXH3_64bits_withSeed(&i, sizeof i, (uint64_t)seed) % 50000);
    return a;
}

/* As a, with other tokens from `from` on. */
static inline struct prompt_ids ids_branch(const struct prompt_ids *a, int from, int seed)
{
    struct prompt_ids b = ids_make(seed, a->n);
    memcpy(b.ids, a->ids, (size_t)from * sizeof *b.ids);
    return b;
}

/* What a block or state after `end` tokens must be. */
static inline void bytes_of(const int32_t *ids, int end, bool state, unsigned char *out, size_t n)
{
    uint64_t seed = XXH3_64bits_withSeed(ids, (size_t)end * sizeof *ids, state ? 7 : 8);
    for (size_t i = 0; i < n; i++) out[i] = (unsigned char)XXH3_64bits_withSeed(&i, sizeof i, seed);
}

/* Of the put or load at hand. */
static const int32_t *at_ids;
static int at_position;
static size_t block_bytes_now = BLOCK_BYTES;
static int asked_blocks, asked_states, wrong_bytes, taken_blocks, taken_states;

static inline void source_block(void *ctx, int block, void *out)
{
    (void)ctx;
    asked_blocks++;
    bytes_of(at_ids, (block + 1) * 64, false, out, block_bytes_now);
}

static inline void source_state(void *ctx, void *out)
{
    (void)ctx;
    asked_states++;
    bytes_of(at_ids, at_position, true, out, STATE_BYTES);
}

static inline void sink_block(void *ctx, int block, const void *bytes)
{
    (void)ctx;
    unsigned char right[4096];
    taken_blocks++;
    bytes_of(at_ids, (block + 1) * 64, false, right, block_bytes_now);
    wrong_bytes += memcmp(right, bytes, block_bytes_now) != 0;
}

static inline void sink_state(void *ctx, const void *bytes)
{
    (void)ctx;
    unsigned char right[STATE_BYTES];
    taken_states++;
    bytes_of(at_ids, at_position, true, right, STATE_BYTES);
    wrong_bytes += memcmp(right, bytes, STATE_BYTES) != 0;
}

static inline enum rc put_err(struct prefix_store *s, const struct prompt_ids *a, int position, struct err *e)
{
    const struct prefix_source source = {NULL, source_block, source_state};
    at_ids = a->ids, at_position = position;
    asked_blocks = asked_states = 0;
    return prefix_store_put(s, a->ids, position, &source, e);
}

static inline enum rc put(struct prefix_store *s, const struct prompt_ids *a, int position)
{
    return put_err(s, a, position, NULL);
}

/* Loads; whatever was taken, even of a miss, must have been right. */
static inline bool load_right(struct prefix_store *s, const struct prompt_ids *a, int from, int position)
{
    const struct prefix_sink sink = {NULL, sink_block, sink_state};
    at_ids = a->ids, at_position = position;
    taken_blocks = taken_states = wrong_bytes = 0;
    bool loaded = prefix_store_load(s, a->ids, from, position, &sink);
    assert_int_equal(wrong_bytes, 0);
    return loaded;
}

/* ---- files ---- */

/* Calls fn for every payload file of rank 0; fn NULL: none. Returns how many. */
static inline int files_each(const struct place *p, const char *suffix, void (*fn)(void *ctx, const char *path), void *ctx)
{
    char folder[128], path[512];
    snprintf(folder, sizeof folder, "%s/rank-0", p->folder);
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    int n = 0;
    for (const struct dirent *at; (at = readdir(dir));) {
        const char *dot = strrchr(at->d_name, '.');
        bool payload = dot && (suffix ? !strcmp(dot, suffix) : !strcmp(dot, ".kv") || !strcmp(dot, ".state"));
        if (!payload || dot - at->d_name != 16) continue;
        snprintf(path, sizeof path, "%s/%s", folder, at->d_name);
        if (fn) fn(ctx, path);
        n++;
    }
    closedir(dir);
    return n;
}

static inline int files_in(const struct place *p) { return files_each(p, NULL, NULL, NULL); }
static inline int unfinished_in(const struct place *p) { return files_each(p, ".new", NULL, NULL); }

static inline void bytes_add(void *ctx, const char *path)
{
    struct stat st;
    if (stat(path, &st) == 0) *(uint64_t *)ctx += (uint64_t)st.st_size;
}

static inline uint64_t bytes_in(const struct place *p)
{
    uint64_t bytes = 0;
    files_each(p, NULL, bytes_add, &bytes);
    return bytes;
}

#endif
