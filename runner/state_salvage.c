/* state_salvage: read without LMDB, written with it.
 *
 * Each table is read from the tree of the newest transaction, then from the one before, then every page of the file is looked through:
 * pages that were freed lately still hold what they held. The first entry of a name counts, so what is reached in order is
 * preferred to what was only found. Jobs are an exception: where their table is whole, older ones are registered no more. A
 * value's checksum covers its key but not its table; what decodes as a job or a result under a key of that length is one. */
#define _GNU_SOURCE
#include "state_salvage.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lmdb_pages.h"
#include "state.h"
#include "state_codec.h"

/* All point into the file, but for custom_id of an orphan. */
struct found_result {
    const unsigned char *key;
    struct state_result result;
    size_t turn; /* in which it was found */
};

struct found_job {
    struct state_job job;
    uint64_t order;
    size_t turn;
};

struct salvage {
    struct lmdb_pages pages;
    struct found_result *results;
    struct found_job *jobs;
    size_t n_results, cap_results, n_jobs, cap_jobs;
    char *identity;
    unsigned char input_digest[32];
    json_t *orphans; /* records that name jobs[].custom_id */
    bool has_digest, jobs_whole, failed;
    bool refused; /* an entry was no job */
};

static void *grow(void *array, size_t n, size_t *cap, size_t item_bytes)
{
    size_t wanted = *cap ? 2 * *cap : 64, n_bytes;
    if (n < *cap) return array;
    void *more = size_mul(wanted, item_bytes, &n_bytes) ? realloc(array, n_bytes) : NULL;
    if (more) *cap = wanted;
    return more;
}

/* ---- reading ---- */

static void take_meta(void *ctx, struct bytes_view key, struct bytes_view value)
{
    struct salvage *s = ctx;
    struct bytes_view v;
    if (!state_value_open(key.bytes, key.len, value.bytes, value.len, &v)) return;
    if (key.len == 8 && !memcmp(key.bytes, "identity", 8) && !s->identity) {
        s->identity = strndup(v.bytes, v.len);
        s->failed = s->failed || !s->identity;
    } else if (key.len == 12 && !memcmp(key.bytes, "input_digest", 12) && v.len == sizeof s->input_digest && !s->has_digest) {
        memcpy(s->input_digest, v.bytes, v.len);
        s->has_digest = true;
    }
}

static void take_job(void *ctx, struct bytes_view key, struct bytes_view value)
{
    struct salvage *s = ctx;
    struct bytes_view v;
    struct found_job j = {.turn = s->n_jobs};
    if (key.len != 8 || !state_value_open(key.bytes, key.len, value.bytes, value.len, &v) || !state_job_decode(v, &j.job)) {
        s->refused = true;
        return;
    }
    for (int i = 0; i < 8; i++) j.order = j.order << 8 | ((const unsigned char *)key.bytes)[i];
    struct found_job *more = grow(s->jobs, s->n_jobs, &s->cap_jobs, sizeof *more);
    s->failed = s->failed || !more;
    if (!more) return;
    s->jobs = more;
    s->jobs[s->n_jobs++] = j;
}

static void take_result(void *ctx, struct bytes_view key, struct bytes_view value)
{
    struct salvage *s = ctx;
    struct bytes_view v;
    struct found_result r = {.key = key.bytes, .turn = s->n_results};
    if (key.len != STATE_KEY_BYTES || !state_value_open(key.bytes, key.len, value.bytes, value.len, &v)) return;
    /* Counts of attempts have keys of that length as well, and might decode. */
    if (!state_result_decode(v, &r.result) || !r.result.record_len || r.result.record[0] != '{') return;
    struct found_result *more = grow(s->results, s->n_results, &s->cap_results, sizeof *more);
    s->failed = s->failed || !more;
    if (!more) return;
    s->results = more;
    s->results[s->n_results++] = r;
}

/* Whether the table of the newest transaction is whole; older entries are taken as well, or only where it is not. */
static bool read_table(struct salvage *s, enum state_table table, bool older, lmdb_pages_fn take)
{
    const char *name = state_table_names[table];
    s->refused = false;
    const bool whole = lmdb_pages_table(&s->pages, true, name, take, s) && !s->refused;
    if (whole && !older) return true;
    lmdb_pages_table(&s->pages, false, name, take, s);
    lmdb_pages_scan(&s->pages, take, s);
    return whole;
}

static enum rc read_all(struct salvage *s, const char *folder, struct err *e)
{
    struct buf path = {0};
    if (!buf_printf(&path, "%s/data.mdb", folder)) return err_no_memory(e);
    enum rc rc = access(path.data, F_OK) ? err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "no_state", "there is no state in %s", folder)
                                         : lmdb_pages_open(path.data, &s->pages, e);
    buf_free(&path);
    if (rc != RC_OK) return rc;
    read_table(s, STATE_META, false, take_meta);
    s->jobs_whole = read_table(s, STATE_JOBS, false, take_job);
    read_table(s, STATE_RESULTS, true, take_result);
    return s->failed ? err_no_memory(e) : RC_OK;
}

/* ---- what was found more than once ---- */

static int by_key(const void *a, const void *b)
{
    const struct found_result *x = a, *y = b;
    const int c = memcmp(x->key, y->key, STATE_KEY_BYTES);
    return c ? c : (x->turn > y->turn) - (x->turn < y->turn);
}

static int by_id(const void *a, const void *b)
{
    const struct found_job *x = a, *y = b;
    const int c = strcmp(x->job.custom_id, y->job.custom_id);
    return c ? c : (x->turn > y->turn) - (x->turn < y->turn);
}

static int by_order(const void *a, const void *b)
{
    const struct found_job *x = a, *y = b;
    if (x->order != y->order) return x->order < y->order ? -1 : 1;
    return (x->turn > y->turn) - (x->turn < y->turn);
}

/* The new state numbers them anew, in the same order. */
static int by_settling(const void *a, const void *b)
{
    const struct found_result *x = a, *y = b;
    return (x->result.settled > y->result.settled) - (x->result.settled < y->result.settled);
}

static void results_unique(struct salvage *s)
{
    size_t n = 0;
    if (s->n_results) qsort(s->results, s->n_results, sizeof *s->results, by_key);
    for (size_t i = 0; i < s->n_results; i++)
        if (!n || memcmp(s->results[n - 1].key, s->results[i].key, STATE_KEY_BYTES)) s->results[n++] = s->results[i];
    s->n_results = n;
}

static void jobs_unique(struct salvage *s)
{
    size_t n = 0;
    if (s->n_jobs) qsort(s->jobs, s->n_jobs, sizeof *s->jobs, by_id);
    for (size_t i = 0; i < s->n_jobs; i++)
        if (!n || strcmp(s->jobs[n - 1].job.custom_id, s->jobs[i].job.custom_id)) s->jobs[n++] = s->jobs[i];
    s->n_jobs = n;
}

/* ---- results whose registration is lost ---- */

static int job_is(const void *key, const void *job) { return strcmp(key, ((const struct found_job *)job)->job.custom_id); }

/* jobs: the first n, in the order of ids. */
static void add_orphan(struct salvage *s, size_t n, const struct found_result *r)
{
    json_t *record = json_loadb(r->result.record, r->result.record_len, 0, NULL);
    const char *id = json_string_value(json_object_get(record, "custom_id"));
    struct found_job *more = id && !(n && bsearch(id, s->jobs, n, sizeof *s->jobs, job_is))
                                 ? grow(s->jobs, s->n_jobs, &s->cap_jobs, sizeof *more)
                                 : NULL;
    if (more) {
        s->jobs = more;
        struct found_job *j = &s->jobs[s->n_jobs];
        *j = (struct found_job){.job = {.custom_id = id, .source = "salvaged"}, .order = UINT64_MAX, .turn = s->n_jobs};
        memcpy(j->job.key, r->key, sizeof j->job.key);
        if (json_array_append(s->orphans, record) == 0) s->n_jobs++;
    }
    json_decref(record);
}

static bool registered(const unsigned char *const *keys, size_t n, const unsigned char *key)
{
    size_t low = 0, high = n;
    while (low < high) {
        const size_t middle = low + (high - low) / 2;
        if (memcmp(keys[middle], key, STATE_KEY_BYTES) < 0) low = middle + 1;
        else high = middle;
    }
    return low < n && !memcmp(keys[low], key, STATE_KEY_BYTES);
}

static int by_bytes(const void *a, const void *b)
{
    return memcmp(*(const unsigned char *const *)a, *(const unsigned char *const *)b, STATE_KEY_BYTES);
}

static enum rc add_orphans(struct salvage *s, struct err *e)
{
    const size_t n = s->n_jobs;
    const unsigned char **keys = calloc(n + 1, sizeof *keys);
    s->orphans = json_array();
    if (!keys || !s->orphans) {
        free(keys);
        return err_no_memory(e);
    }
    /* jobs moves when it grows: its keys are copied out first. */
    unsigned char *copies = calloc(n + 1, STATE_KEY_BYTES);
    for (size_t i = 0; i < n && copies; i++)
        keys[i] = memcpy(copies + i * STATE_KEY_BYTES, s->jobs[i].job.key, STATE_KEY_BYTES);
    if (copies) qsort(keys, n, sizeof *keys, by_bytes);
    for (size_t i = 0; i < s->n_results && copies; i++)
        if (!registered(keys, n, s->results[i].key)) add_orphan(s, n, &s->results[i]);
    const bool good = copies != NULL;
    free(copies);
    free(keys);
    return good ? RC_OK : err_no_memory(e);
}

/* ---- writing ---- */

static void remove_state(const char *folder)
{
    static const char *const files[] = {"data.mdb", "lock.mdb", "id", "id.new", "lock"};
    const int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    for (size_t i = 0; i < sizeof files / sizeof *files && fd >= 0; i++) unlinkat(fd, files[i], 0);
    if (fd >= 0) close(fd);
    rmdir(folder);
}

static void job_at(const void *ctx, size_t i, struct state_job *out) { *out = ((const struct salvage *)ctx)->jobs[i].job; }

static enum rc write_all(struct salvage *s, const char *folder, struct err *e)
{
    struct state *to = NULL;
    enum rc rc = state_open(folder, STATE_WRITE, &to, e);
    if (rc == RC_OK) rc = state_bind_identity(to, s->identity ? s->identity : "identity=lost\n", e);
    const struct state_job_list jobs = {s->n_jobs, job_at, s};
    if (s->n_jobs) qsort(s->jobs, s->n_jobs, sizeof *s->jobs, by_order);
    if (s->n_results) qsort(s->results, s->n_results, sizeof *s->results, by_settling);
    if (rc == RC_OK) rc = state_register(to, &jobs, s->input_digest, e);
    for (size_t i = 0; i < s->n_results && rc == RC_OK; i++) rc = state_put_result(to, s->results[i].key, &s->results[i].result, e);
    state_close(to);
    if (rc != RC_OK) remove_state(folder);
    return rc;
}

/* ---- both ---- */

/* The lock of a state that may be in use; -1 where there is none to take. */
static enum rc lock_take(const char *folder, int *fd, struct err *e)
{
    struct buf path = {0};
    if (!buf_printf(&path, "%s/lock", folder)) return err_no_memory(e);
    *fd = open(path.data, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    buf_free(&path);
    if (*fd < 0 || flock(*fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return RC_OK;
    return err_set(e, RC_FAILED, EXIT_RESUMABLE, "state_locked", "%s is in use", folder);
}

static enum rc target_free(const char *folder, struct err *e)
{
    struct stat st;
    if (lstat(folder, &st) && errno == ENOENT) return RC_OK;
    return err_set(e, RC_FAILED, EXIT_NO_OUTPUT, "state_exists", "%s exists; a state is salvaged to where there is none", folder);
}

enum rc state_salvage(const char *from, const char *to, struct state_salvaged *out, struct err *e)
{
    struct salvage s = {0};
    int lock = -1;
    *out = (struct state_salvaged){0};
    enum rc rc = target_free(to, e);
    if (rc == RC_OK) rc = lock_take(from, &lock, e);
    if (rc == RC_OK) rc = read_all(&s, from, e);
    if (rc == RC_OK) {
        results_unique(&s);
        jobs_unique(&s);
    }
    if (rc == RC_OK && !s.jobs_whole) rc = add_orphans(&s, e);
    if (rc == RC_OK) jobs_unique(&s);
    if (rc == RC_OK && !s.n_jobs && !s.n_results)
        rc = err_set(e, RC_FAILED, EXIT_IO, "nothing_salvaged", "nothing can be read of the state in %s", from);
    if (rc == RC_OK) rc = write_all(&s, to, e);
    if (rc == RC_OK) *out = (struct state_salvaged){s.n_jobs, s.n_results, s.identity != NULL};
    if (lock >= 0) close(lock);
    lmdb_pages_close(&s.pages);
    free(s.results);
    free(s.jobs);
    free(s.identity);
    json_decref(s.orphans);
    return rc;
}
