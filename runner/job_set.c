/* job_set: all lines of all job files, in order, as small entries.
 *
 * One pass a file: read a line, parse it, look its custom_id up in a hash table of entry numbers, digest its
 * documents, keep digests and places, forget the text. Later readers come back to the file by offset through the
 * descriptor opened here, so a file that is renamed or replaced meanwhile does no harm, and one that is written into
 * is noticed by its line's digest.
 *
 * A problem is a line that is no job. Each is reported when it is found; what happens next is the caller's option. A
 * fault is a job's own; it is kept with its entry and never stops anything. */
#define _GNU_SOURCE
#include "job_set.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <jansson.h>
#include <libgen.h>
#include <nettle/sha2.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <xxhash.h>

#include "job_line.h"
#include "tokenizer.h"

/* custom_id -> entry number + 1; open addressing, at most half full. */
struct id_table {
    size_t *slots;
    size_t cap;
};

struct loading {
    struct job_set *set;
    const struct options *options;
    job_problem_fn problem;
    void *ctx;
    struct id_table ids;
    struct sha256_ctx input;
    struct state *known; /* NULL: nothing is known */
    struct buf scratch;  /* of what is */
};

static void sha256_of(const void *bytes, size_t len, unsigned char out[32])
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    sha256_update(&sha, len, bytes);
    sha256_digest(&sha, 32, out);
}

/* ---- columns ---- */

/* End of the string that opens at line[at], counting characters into *column. */
static size_t string_skip(const char *line, size_t len, size_t at, int64_t *column)
{
    for (at++; at < len && line[at] != '"'; at++) {
        if (line[at] == '\\' && at + 1 < len) at++, ++*column;
        if (((unsigned char)line[at] & 0xC0) != 0x80) ++*column;
    }
    ++*column;
    return at;
}

/* Column of a key at a depth of nesting: quotes inside strings are escaped, so a quoted name before a colon is a
 * key. */
static int64_t key_column(const char *line, size_t len, const char *key, size_t key_len, int wanted_depth)
{
    int depth = 0;
    int64_t column = 0;
    for (size_t i = 0; i < len; i++) {
        if (((unsigned char)line[i] & 0xC0) != 0x80) column++;
        if (line[i] == '{' || line[i] == '[') depth++;
        if (line[i] == '}' || line[i] == ']') depth--;
        if (line[i] != '"') continue;
        size_t first = i + 1;
        int64_t first_column = column;
        i = string_skip(line, len, i, &column);
        size_t next = i + 1;
        while (next < len && (line[next] == ' ' || line[next] == '\t')) next++;
        if (depth == wanted_depth && next < len && line[next] == ':' && i - first == key_len &&
            !memcmp(line + first, key, key_len))
            return first_column;
    }
    return 1;
}

/* A job's own fault as a problem; its param ("messages[0].content") begins with a key of body, or with "tandem". */
static void fault_problem(const struct job_fault *fault, const char *path, const struct job_line *line, struct err *out)
{
    size_t key_len = strcspn(fault->param, "[.");
    int depth = !strncmp(fault->param, "tandem", key_len) && key_len == strlen("tandem") ? 1 : 2;
    int64_t column = key_len && line->len ? key_column(line->bytes, line->len, fault->param, key_len, depth) : 1;
    *out = (struct err){0};
    err_set(out, RC_BAD_INPUT, 0, fault->code[0] ? fault->code : "failed", "%d %s%s%s", fault->status, fault->param,
            fault->param[0] ? ": " : "", fault->message);
    err_place(out, path, line->number, column, line->byte);
}

/* ---- ids ---- */

static size_t *id_slot(const struct job_set *set, const struct id_table *t, const char *id)
{
    size_t at = XXH3_64bits(id, strlen(id)) & (t->cap - 1);
    while (t->slots[at] && strcmp(set->entries[t->slots[at] - 1].custom_id, id)) at = (at + 1) & (t->cap - 1);
    return &t->slots[at];
}

static const struct job_entry *id_find(const struct loading *l, const char *id)
{
    if (!l->ids.cap) return NULL;
    size_t slot = *id_slot(l->set, &l->ids, id);
    return slot ? &l->set->entries[slot - 1] : NULL;
}

/* Makes room for one more and enters the last entry. */
static bool id_add_last(struct loading *l)
{
    struct job_set *set = l->set;
    if (set->n_entries * 2 > l->ids.cap) {
        struct id_table bigger = {.cap = l->ids.cap ? l->ids.cap * 2 : 256};
        bigger.slots = calloc(bigger.cap, sizeof *bigger.slots);
        if (!bigger.slots) return false;
        for (size_t i = 0; i + 1 < set->n_entries; i++) *id_slot(set, &bigger, set->entries[i].custom_id) = i + 1;
        free(l->ids.slots);
        l->ids = bigger;
    }
    *id_slot(set, &l->ids, set->entries[set->n_entries - 1].custom_id) = set->n_entries;
    return true;
}

/* ---- entries ---- */

static struct job_entry *entry_new(struct job_set *set)
{
    if (set->n_entries == set->cap_entries) {
        size_t cap = set->cap_entries ? set->cap_entries * 2 : 64, bytes;
        struct job_entry *bigger = size_mul(cap, sizeof *bigger, &bytes) ? realloc(set->entries, bytes) : NULL;
        if (!bigger) return NULL;
        set->entries = bigger;
        set->cap_entries = cap;
    }
    struct job_entry *entry = &set->entries[set->n_entries++];
    *entry = (struct job_entry){0};
    return entry;
}

static bool entry_fault(struct job_entry *entry, const struct job_fault *fault)
{
    entry->fault = malloc(sizeof *entry->fault);
    if (entry->fault) *entry->fault = *fault;
    return entry->fault != NULL;
}

/* What the line itself says is its id; NULL when it says none that could be used. */
static char *line_custom_id(const struct job_line *line)
{
    json_error_t ignored;
    json_t *root = line->len ? json_loadb(line->bytes, line->len, JSON_DECODE_INT_AS_REAL, &ignored) : NULL;
    const char *id = json_string_value(json_object_get(root, "custom_id"));
    char *copy = id && *id && strlen(id) <= 512 ? strdup(id) : NULL;
    json_decref(root);
    return copy;
}

/* An id for a line that is no job: its own if it is still free, else its place. */
static char *bad_line_id(const struct loading *l, const struct job_line *line, const char *path)
{
    char *own = line_custom_id(line);
    if (own && !id_find(l, own)) return own;
    free(own);
    struct buf id = {0};
    buf_printf(&id, "line-%" PRId64 "@", line->number);
    utf8_append_complete(&id, path, strlen(path));
    while (!id.failed && id_find(l, id.data)) buf_append_str(&id, "'");
    if (id.failed) buf_free(&id);
    return id.data;
}

static enum rc bad_line(struct loading *l, int source, const struct job_line *line, const struct err *problem,
                        struct err *e)
{
    struct job_set *set = l->set;
    set->problems++;
    if (l->problem) l->problem(l->ctx, problem);
    if (!l->options->skip_bad_lines) return RC_OK;
    char *id = bad_line_id(l, line, set->sources[source].path);
    struct job_entry *entry = id ? entry_new(set) : NULL;
    if (!entry) {
        free(id);
        return err_no_memory(e);
    }
    struct job_fault fault = {0};
    job_fault_set(&fault, line->too_long ? 413 : 400, "invalid_request_error", problem->code, "", "%s", problem->text);
    *entry = (struct job_entry){.source = source,
                                .line = line->number,
                                .byte = line->byte,
                                .len = line->len,
                                .custom_id = id,
                                .bad_line = true};
    sha256_of(line->bytes, line->len, entry->line_digest);
    memcpy(entry->body_digest, entry->line_digest, 32);
    sha256_update(&l->input, 32, entry->line_digest);
    return entry_fault(entry, &fault) && id_add_last(l) ? RC_OK : err_no_memory(e);
}

static void duplicate_problem(const struct loading *l, const struct job_entry *first, const struct job_line *line,
                              const char *path, struct err *problem)
{
    err_set(problem, RC_BAD_INPUT, EXIT_JOB_FILE, "duplicate_custom_id",
            "custom_id \"%.64s\" is also that of %s:%" PRId64, first->custom_id, l->set->sources[first->source].path,
            first->line);
    err_place(problem, path, line->number, key_column(line->bytes, line->len, "custom_id", 9, 1), line->byte);
}

static size_t count_documents(const struct job_spec *s)
{
    size_t n = 0;
    for (size_t i = 0; i < s->n_messages; i++)
        for (size_t j = 0; j < s->messages[i].n_parts; j++) n += s->messages[i].parts[j].document_path != NULL;
    return n;
}

static void body_digest(const struct job_spec *s, unsigned char out[32])
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    sha256_update(&sha, 1, (const uint8_t *)(s->endpoint == JOB_CHAT ? "c" : "p"));
    sha256_update(&sha, strlen(s->canonical_body), (const uint8_t *)s->canonical_body);
    if (s->canonical_tandem) sha256_update(&sha, strlen(s->canonical_tandem), (const uint8_t *)s->canonical_tandem);
    sha256_digest(&sha, 32, out);
}

/* Digests of the job's documents; a document that cannot be read is the job's own fault, seen now. */
static bool entry_documents(struct job_entry *entry, struct document_root *root, struct job_spec *spec)
{
    struct buf digests = {0};
    entry->n_documents = count_documents(spec);
    if (!entry->n_documents || spec->fault.status) return true;
    if (document_digests(root, spec, &digests, &spec->fault) && digests.len) {
        entry->document_digests = (unsigned char *)digests.data;
        entry->document_digests_bytes = digests.len;
        return true;
    }
    buf_free(&digests);
    return spec->fault.status != 0;
}

static enum rc good_line(struct loading *l, int source, const struct job_line *line, struct job_spec *spec,
                         struct err *e)
{
    struct job_set *set = l->set;
    struct job_entry *entry = entry_new(set);
    if (!entry) return err_no_memory(e);
    entry->source = source;
    entry->line = line->number;
    entry->byte = line->byte;
    entry->len = line->len;
    entry->custom_id = spec->custom_id;
    entry->priority = spec->priority;
    spec->custom_id = NULL;
    sha256_of(line->bytes, line->len, entry->line_digest);
    sha256_update(&l->input, 32, entry->line_digest);
    body_digest(spec, entry->body_digest);
    if (!id_add_last(l) || !entry_documents(entry, set->sources[source].root, spec)) return err_no_memory(e);
    job_head_make(spec, entry->document_digests, entry->document_digests_bytes, &entry->head);
    if (!spec->fault.status) return RC_OK;
    set->faults++;
    struct err problem;
    fault_problem(&spec->fault, set->sources[source].path, line, &problem);
    if (l->problem) l->problem(l->ctx, &problem);
    return entry_fault(entry, &spec->fault) ? RC_OK : err_no_memory(e);
}

/* A line that is registered in this place and has its answer becomes an entry as it was then. RC_RETRY: it is not. Failures
 * are parsed again: what was a line's fault then may be none now. */
static enum rc settled_line(struct loading *l, int source, const struct job_line *line, struct err *e)
{
    struct job_set *set = l->set;
    struct state_job job;
    enum state_result_kind kind;
    unsigned char digest[32];
    if (!l->known || set->n_entries >= state_job_count(l->known) || line->too_long) return RC_RETRY;
    enum rc rc = state_job_at(l->known, set->n_entries, &l->scratch, &job, e);
    if (rc != RC_OK) return rc;
    sha256_of(line->bytes, line->len, digest);
    if (memcmp(digest, job.line_digest, sizeof digest)) return RC_RETRY;
    rc = state_result_kind(l->known, job.key, &kind, e);
    if (rc != RC_OK) return rc;
    if (kind != STATE_OUTPUT || id_find(l, job.custom_id)) return RC_RETRY;
    struct job_entry *entry = entry_new(set);
    if (!entry) return err_no_memory(e);
    *entry = (struct job_entry){.source = source,
                                .line = line->number,
                                .byte = line->byte,
                                .len = line->len,
                                .custom_id = strdup(job.custom_id),
                                .n_documents = job.document_digests_bytes / DIGEST_BYTES,
                                .document_digests_bytes = job.document_digests_bytes,
                                .settled = true};
    if (job.document_digests_bytes) entry->document_digests = malloc(job.document_digests_bytes);
    if (!entry->custom_id || (job.document_digests_bytes && !entry->document_digests) || !id_add_last(l)) return err_no_memory(e);
    if (entry->document_digests) memcpy(entry->document_digests, job.document_digests, job.document_digests_bytes);
    memcpy(entry->line_digest, digest, sizeof digest);
    memcpy(entry->key, job.key, sizeof entry->key);
    sha256_update(&l->input, sizeof digest, digest);
    return RC_OK;
}

static enum rc line_load(struct loading *l, int source, const struct job_line *line, struct err *e)
{
    struct err problem = {0};
    struct job_spec spec = {0};
    const char *path = l->set->sources[source].path;
    enum rc rc = settled_line(l, source, line, e);
    if (rc != RC_RETRY) return rc;
    rc = RC_BAD_INPUT;
    if (line->too_long) {
        err_set(&problem, rc, EXIT_JOB_FILE, "line_too_large", "the line has more than %d bytes", JOB_LINE_MAX_BYTES);
        err_place(&problem, path, line->number, 1, line->byte);
    } else {
        rc = job_spec_parse(line->bytes, line->len, path, line->number, line->byte, &spec, &problem);
    }
    const struct job_entry *first = rc == RC_OK ? id_find(l, spec.custom_id) : NULL;
    if (first) {
        duplicate_problem(l, first, line, path, &problem);
        rc = RC_BAD_INPUT;
    }
    if (rc == RC_OK)
        rc = good_line(l, source, line, &spec, e);
    else if (rc == RC_BAD_INPUT)
        rc = bad_line(l, source, line, &problem, e);
    else if (e)
        *e = problem;
    job_spec_free(&spec);
    return rc;
}

/* ---- files ---- */

static enum rc source_open(struct job_source *s, const char *path, const char *root, struct err *e)
{
    *s = (struct job_source){.path = path, .fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
    if (s->fd < 0) return err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "cannot_open", "cannot open %s", path);
    if (root) return document_root_open(root, &s->root, e);
    char *copy = strdup(path);
    if (!copy) return err_no_memory(e);
    enum rc rc = document_root_open(dirname(copy), &s->root, e);
    free(copy);
    return rc;
}

static enum rc source_load(struct loading *l, const char *path, struct err *e)
{
    struct job_set *set = l->set;
    int source = set->n_sources++;
    struct job_reader *reader = NULL;
    struct job_line line;
    enum rc rc = source_open(&set->sources[source], path, l->options->root, e);
    if (rc == RC_OK) rc = job_reader_open(path, JOB_LINE_MAX_BYTES, &reader, e);
    if (rc != RC_OK) return rc;
    while ((rc = job_reader_next(reader, &line, e)) == RC_OK)
        if ((rc = line_load(l, source, &line, e)) != RC_OK) break;
    job_reader_close(reader);
    return rc == RC_RETRY ? RC_OK : rc;
}

enum rc job_set_load(const struct options *o, struct state *known, job_problem_fn problem, void *ctx, struct job_set *out,
                     struct err *e)
{
    struct loading l = {.set = out, .options = o, .problem = problem, .ctx = ctx, .known = known};
    *out = (struct job_set){.sources = calloc(OPTIONS_MAX_FILES, sizeof *out->sources)};
    if (!out->sources) return err_no_memory(e);
    sha256_init(&l.input);
    enum rc rc = RC_OK;
    for (int i = 0; i < o->n_files && rc == RC_OK; i++) rc = source_load(&l, o->files[i], e);
    sha256_digest(&l.input, 32, out->input_digest);
    free(l.ids.slots);
    buf_free(&l.scratch);
    if (rc == RC_OK && out->problems && !o->skip_bad_lines)
        rc = err_set(e, RC_BAD_INPUT, EXIT_JOB_FILE, "bad_lines", "%zu %s no job; nothing was run", out->problems,
                     out->problems == 1 ? "line is" : "lines are");
    return rc;
}

void job_set_free(struct job_set *set)
{
    for (size_t i = 0; i < set->n_entries; i++) {
        free(set->entries[i].fault);
        free(set->entries[i].document_digests);
        free(set->entries[i].custom_id);
    }
    free(set->entries);
    for (int i = 0; i < set->n_sources; i++) {
        document_root_close(set->sources[i].root);
        if (set->sources[i].fd >= 0) close(set->sources[i].fd);
    }
    free(set->sources);
    *set = (struct job_set){0};
}

void job_problem_print(void *ctx, const struct err *problem)
{
    (void)ctx;
    char text[1100];
    if (problem->exit_status != EXIT_JOB_FILE) return;
    fprintf(stderr, "%s\n", err_format(problem, text, sizeof text));
}

struct document_root *job_set_root(const struct job_set *set, size_t i)
{
    return set->sources[set->entries[i].source].root;
}

/* ---- coming back to a line ---- */

/* The line's bytes as they were when the set was loaded; false when the file changed meanwhile. */
static bool line_read(const struct job_set *set, const struct job_entry *entry, struct buf *out)
{
    unsigned char digest[32];
    if (!buf_reserve(out, entry->len)) return false;
    while (out->len < entry->len) {
        ssize_t n = pread(set->sources[entry->source].fd, out->data + out->len, entry->len - out->len,
                          (off_t)(entry->byte + (int64_t)out->len));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        out->len += (size_t)n;
    }
    sha256_of(out->data, out->len, digest);
    return memcmp(digest, entry->line_digest, 32) == 0;
}

bool job_set_spec(const struct job_set *set, size_t i, struct job_spec *out, struct job_fault *fault)
{
    const struct job_entry *entry = &set->entries[i];
    const char *path = set->sources[entry->source].path;
    struct buf line = {0};
    *out = (struct job_spec){0};
    if (entry->fault) {
        *fault = *entry->fault;
        return false;
    }
    bool good = line_read(set, entry, &line);
    if (!good && line.failed)
        job_fault_set(fault, 500, "server_error", "out_of_memory", "", "out of memory");
    else if (!good || job_spec_parse(line.data, line.len, path, entry->line, entry->byte, out, NULL) != RC_OK)
        job_fault_set(fault, 422, "invalid_request_error", "line_changed", "",
                      "line %" PRId64 " of %s has changed since "
                      "the run began",
                      entry->line, path);
    else
        *fault = out->fault;
    buf_free(&line);
    if (!fault->status) return true;
    job_spec_free(out);
    return false;
}

void job_set_fault_place(const struct job_set *set, size_t i, const struct job_fault *fault, struct err *out)
{
    const struct job_entry *entry = &set->entries[i];
    struct buf bytes = {0};
    struct job_line line = {.number = entry->line, .byte = entry->byte};
    if (line_read(set, entry, &bytes)) line.bytes = bytes.data, line.len = bytes.len;
    fault_problem(fault, set->sources[entry->source].path, &line, out);
    buf_free(&bytes);
}

/* ---- keys ---- */

static void key_part(struct sha256_ctx *sha, const void *bytes, size_t len)
{
    unsigned char size[8];
    for (int i = 0; i < 8; i++) size[i] = (unsigned char)((uint64_t)len >> (8 * i));
    sha256_update(sha, sizeof size, size);
    sha256_update(sha, len, bytes);
}

void job_set_key(const struct job_entry *entry, const char *identity, unsigned char out[STATE_KEY_BYTES])
{
    struct sha256_ctx sha;
    sha256_init(&sha);
    key_part(&sha, identity, strlen(identity));
    key_part(&sha, entry->custom_id, strlen(entry->custom_id));
    key_part(&sha, entry->body_digest, sizeof entry->body_digest);
    key_part(&sha, entry->document_digests, entry->document_digests_bytes);
    sha256_digest(&sha, STATE_KEY_BYTES, out);
}

/* Pins of an earlier registration count, where they fit: a pin of a job whose documents could not be read is empty. */
static enum rc entry_pin(struct job_entry *entry, struct state *s, struct err *e)
{
    struct buf pinned = {0};
    if (!entry->n_documents) return RC_OK;
    enum rc rc = state_pinned(s, entry->custom_id, entry->line_digest, &pinned, e);
    if (rc == RC_OK && pinned.len == entry->n_documents * DIGEST_BYTES) {
        free(entry->document_digests);
        entry->document_digests = (unsigned char *)pinned.data;
        entry->document_digests_bytes = pinned.len;
    } else {
        buf_free(&pinned);
    }
    return rc == RC_RETRY ? RC_OK : rc;
}

/* For state_register. */
static void registered_job(const void *ctx, size_t i, struct state_job *out)
{
    const struct job_set *set = ctx;
    const struct job_entry *entry = &set->entries[i];
    *out = (struct state_job){.custom_id = entry->custom_id,
                              .source = set->sources[entry->source].path,
                              .line = entry->line,
                              .document_digests = entry->document_digests,
                              .document_digests_bytes = entry->document_digests_bytes};
    memcpy(out->key, entry->key, sizeof out->key);
    memcpy(out->line_digest, entry->line_digest, sizeof out->line_digest);
}

enum rc job_set_register(struct job_set *set, struct state *s, const char *identity, struct err *e)
{
    enum rc rc = RC_OK;
    for (size_t i = 0; i < set->n_entries && rc == RC_OK; i++) {
        struct job_entry *entry = &set->entries[i];
        if (entry->settled) continue;
        rc = entry_pin(entry, s, e);
        job_set_key(entry, identity, entry->key);
    }
    const struct state_job_list jobs = {set->n_entries, registered_job, set};
    return rc == RC_OK ? state_register(s, &jobs, set->input_digest, e) : rc;
}
