/* prefix_store: index and payload files together.
 *
 * Order of a put: room is made (eviction commits, then unlinks), the payload is written and durable under its name, then the index
 * commit makes it findable. A process that dies in between leaves a file that the next opening alone adopts or deletes. Two
 * processes may put the same; the second to commit finds the keys taken and deletes its own file. A file that is evicted while
 * another process reads it stays readable for that process.
 *
 * Names are hashes and can be forged, so a load trusts none: a payload file holds the token ids of its blocks and the SHA-256 of all
 * token ids before them, and both must be the prompt's.
 *
 * The folder's lock (flock) says who has the index open: shared while a store is open, exclusive while prefix_recover works. */
#define _GNU_SOURCE
#include "prefix_store.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <nettle/sha2.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <xxhash.h>

#include "lmdb_check.h"
#include "prefix_evict.h"
#include "prefix_index.h"
#include "prefix_recover.h"

/* Files of at least this many bytes, where blocks are smaller: large enough to be read at a disk's speed, small enough that
 * evicting one is a small loss. */
static const size_t file_wanted_bytes = (size_t)32 << 20;
static const int64_t lock_wait_us = 60 * 1000000, lock_poll_us = 20000;

struct prefix_store {
    struct prefix_store *next; /* of all open in this process */
    struct prefix_store_options o;
    char folder[PATH_MAX];     /* DIR/rank-N */
    int folder_fd, lock_fd;
    dev_t device;
    ino_t inode;
    struct prefix_index index;
    struct prefix_marks marks;
    struct prefix_payload payload; /* of the file at hand */
    void *scratch;                 /* [max(block_bytes, state_bytes)] */
};

void prefix_chain(const struct prefix_key *fingerprint, const int32_t *tokens, int n_tokens, struct prefix_key *keys)
{
    struct {
        struct prefix_key before;
        int32_t tokens[PREFIX_BLOCK_TOKENS];
    } link = {.before = *fingerprint};
    for (int b = 0; b < n_tokens / PREFIX_BLOCK_TOKENS; b++) {
        XXH128_canonical_t canonical;
        memcpy(link.tokens, tokens + (size_t)b * PREFIX_BLOCK_TOKENS, sizeof link.tokens);
        XXH128_canonicalFromHash(&canonical, XXH3_128bits(&link, sizeof link));
        memcpy(link.before.bytes, canonical.digest, sizeof link.before.bytes);
        keys[b] = link.before;
    }
}

/* ---- opening ---- */

/* LMDB's locks break when a process opens a file twice. */
static pthread_mutex_t open_stores_lock = PTHREAD_MUTEX_INITIALIZER;
static struct prefix_store *open_stores;

static bool opened_once(struct prefix_store *s)
{
    pthread_mutex_lock(&open_stores_lock);
    const struct prefix_store *at = open_stores;
    while (at && (at->device != s->device || at->inode != s->inode)) at = at->next;
    if (!at) s->next = open_stores, open_stores = s;
    pthread_mutex_unlock(&open_stores_lock);
    return !at;
}

static void opened_no_more(struct prefix_store *s)
{
    pthread_mutex_lock(&open_stores_lock);
    struct prefix_store **at = &open_stores;
    while (*at && *at != s) at = &(*at)->next;
    if (*at) *at = s->next;
    pthread_mutex_unlock(&open_stores_lock);
}

static enum rc folder_make(const char *path, struct err *e)
{
    if (mkdir(path, 0700) == 0 || errno == EEXIST) return RC_OK;
    bool full = errno == ENOSPC || errno == EDQUOT;
    return err_errno(e, RC_FAILED, full ? EXIT_IO : EXIT_NO_OUTPUT, full ? "store_disk_full" : "store_io",
                     "cannot make the cache folder %s", path);
}

static enum rc folder_open(struct prefix_store *s, struct err *e)
{
    int n = snprintf(s->folder, sizeof s->folder, "%s/rank-%d", s->o.folder, s->o.rank);
    if (n < 0 || (size_t)n >= sizeof s->folder)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "path_too_long", "the path of the cache folder is too long");
    enum rc rc = s->o.must_exist ? RC_OK : folder_make(s->o.folder, e);
    if (rc == RC_OK && !s->o.must_exist) rc = folder_make(s->folder, e);
    if (rc != RC_OK) return rc;
    s->folder_fd = open(s->folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s->folder_fd < 0 && s->o.must_exist)
        return err_errno(e, RC_BAD_INPUT, EXIT_NO_INPUT, "no_store", "there is no cache of rank %d in %s", s->o.rank, s->o.folder);
    struct stat st;
    if (s->folder_fd < 0 || fstat(s->folder_fd, &st))
        return err_errno(e, RC_FAILED, EXIT_NO_OUTPUT, "store_io", "cannot open the cache folder %s", s->folder);
    s->device = st.st_dev;
    s->inode = st.st_ino;
    const char *remote = lmdb_remote_filesystem(s->folder_fd);
    if (remote)
        return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "remote_store", "%s lies on %s: a cache must lie on a local disk", s->o.folder,
                       remote);
    return RC_OK;
}

/* Takes the lock shared, or exclusive when that can be had and alone is not NULL. */
static enum rc lock_take(struct prefix_store *s, bool *alone, struct err *e)
{
    for (int64_t waited_us = 0; waited_us < lock_wait_us; waited_us += lock_poll_us) {
        if (alone && (*alone = flock(s->lock_fd, LOCK_EX | LOCK_NB) == 0)) return RC_OK;
        if (flock(s->lock_fd, LOCK_SH | LOCK_NB) == 0) return RC_OK;
        if (errno != EWOULDBLOCK && errno != EINTR)
            return err_errno(e, RC_FAILED, EXIT_IO, "store_io", "cannot lock %s", s->folder);
        sleep_us(lock_poll_us);
    }
    return err_set(e, RC_RETRY, EXIT_RESUMABLE, "store_busy", "another process is looking through the cache in %s", s->folder);
}

static enum rc index_open(struct prefix_store *s, struct err *e)
{
    bool alone = false;
    char path[PATH_MAX + sizeof PREFIX_INDEX_NAME + 1];
    s->lock_fd = openat(s->folder_fd, "lock", O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->lock_fd < 0) return err_errno(e, RC_FAILED, EXIT_IO, "store_io", "cannot open %s/lock", s->folder);
    enum rc rc = lock_take(s, &alone, e);
    if (rc != RC_OK) return rc;
    rc = alone ? prefix_recover(s->folder, s->folder_fd, e) : prefix_recover_check(s->folder, e);
    /* Another process may recover in between: so nothing is open yet. */
    if (rc == RC_OK && alone) rc = lock_take(s, NULL, e);
    if (rc != RC_OK) return rc;
    snprintf(path, sizeof path, "%s/%s", s->folder, PREFIX_INDEX_NAME);
    int mdb = prefix_index_open(path, false, &s->index);
    return mdb ? prefix_index_error(mdb, "cannot open it", e) : RC_OK;
}

enum rc prefix_store_open(const struct prefix_store_options *o, struct prefix_store **out, struct err *e)
{
    struct prefix_store *s = calloc(1, sizeof *s);
    size_t largest = o->block_bytes > o->state_bytes ? o->block_bytes : o->state_bytes;
    *out = NULL;
    if (!s) return err_no_memory(e);
    s->o = *o;
    s->folder_fd = s->lock_fd = -1;
    s->scratch = malloc(largest + 1);
    enum rc rc = s->scratch ? folder_open(s, e) : err_no_memory(e);
    if (rc == RC_OK && !opened_once(s))
        rc = err_set(e, RC_FAILED, EXIT_INTERNAL, "store_open", "this process has the cache in %s open already", s->folder);
    if (rc == RC_OK && (rc = index_open(s, e)) != RC_OK) err_place(e, s->folder, 0, 0, 0);
    if (rc == RC_OK)
        *out = s;
    else
        prefix_store_close(s);
    return rc;
}

void prefix_store_close(struct prefix_store *s)
{
    if (!s) return;
    prefix_index_close(&s->index);
    if (s->lock_fd >= 0) close(s->lock_fd);
    if (s->folder_fd >= 0) close(s->folder_fd);
    opened_no_more(s);
    prefix_marks_free(&s->marks);
    free(s->scratch);
    free(s);
}

/* ---- prompts ---- */

struct prompt {
    const int32_t *tokens;
    int n_blocks;
    struct prefix_key *keys; /* [n_blocks] */
    struct sha256_ctx hash;  /* of the first hashed_blocks blocks */
    int hashed_blocks;
};

static bool prompt_open(const struct prefix_store *s, const int32_t *tokens, int n_blocks, struct prompt *out)
{
    *out = (struct prompt){.tokens = tokens, .n_blocks = n_blocks, .keys = calloc((size_t)n_blocks + 1, sizeof *out->keys)};
    if (!out->keys) return false;
    prefix_chain(&s->o.fingerprint, tokens, n_blocks * PREFIX_BLOCK_TOKENS, out->keys);
    sha256_init(&out->hash);
    return true;
}

/* SHA-256 of the token ids before a block. */
static void prompt_digest(struct prompt *p, int block, unsigned char out[PREFIX_DIGEST_BYTES])
{
    if (block < p->hashed_blocks) {
        sha256_init(&p->hash);
        p->hashed_blocks = 0;
    }
    const int32_t *from = p->tokens + (size_t)p->hashed_blocks * PREFIX_BLOCK_TOKENS;
    sha256_update(&p->hash, (size_t)(block - p->hashed_blocks) * PREFIX_BLOCK_TOKENS * sizeof *from, (const uint8_t *)from);
    p->hashed_blocks = block;
    struct sha256_ctx copy = p->hash;
    sha256_digest(&copy, PREFIX_DIGEST_BYTES, out);
}

static const struct prefix_key *key_before(const struct prefix_store *s, const struct prompt *p, int block)
{
    return block ? &p->keys[block - 1] : &s->o.fingerprint;
}

static bool position_possible(int position)
{
    return position > 0 && position % PREFIX_BLOCK_TOKENS == 0 && position < INT_MAX - PREFIX_FILE_BLOCKS * PREFIX_BLOCK_TOKENS;
}

static void file_unlink(const struct prefix_store *s, struct prefix_name n)
{
    char name[PREFIX_NAME_CHARS];
    prefix_name_format(n, name);
    unlinkat(s->folder_fd, name, 0);
}

/* ---- finding ---- */

int prefix_store_lookup(struct prefix_store *s, const int32_t *tokens, int n_tokens, uint64_t *servable)
{
    struct prompt p;
    MDB_txn *txn;
    uint64_t id;
    int n_blocks = n_tokens > 0 ? (n_tokens - 1) / PREFIX_BLOCK_TOKENS : 0, b = 0;
    memset(servable, 0, PREFIX_WORDS(n_tokens > 0 ? n_tokens : 0) * sizeof *servable);
    if (!prompt_open(s, tokens, n_blocks, &p)) return 0;
    if (prefix_index_read(&s->index, &txn) == 0) {
        for (; b < n_blocks; b++) {
            if (s->o.block_bytes && prefix_index_find(&s->index, txn, PREFIX_KV, &p.keys[b], &id)) break;
            if (!s->o.state_bytes || prefix_index_find(&s->index, txn, PREFIX_STATE, &p.keys[b], &id) == 0)
                servable[b / PREFIX_WORD_BITS] |= UINT64_C(1) << b % PREFIX_WORD_BITS;
        }
        mdb_txn_abort(txn);
    }
    free(p.keys);
    return b * PREFIX_BLOCK_TOKENS;
}

int prefix_greatest(const uint64_t *servable, int n_tokens)
{
    for (int b = n_tokens > 0 ? (n_tokens - 1) / PREFIX_BLOCK_TOKENS - 1 : -1; b >= 0; b--)
        if (servable[b / PREFIX_WORD_BITS] >> b % PREFIX_WORD_BITS & 1) return (b + 1) * PREFIX_BLOCK_TOKENS;
    return 0;
}

struct forgotten {
    struct prefix_name name;
    const struct prefix_key *key; /* that led to it; NULL: none */
};

static int forget_apply(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    const struct forgotten *f = ctx;
    return f->key ? prefix_index_forget(ix, txn, f->name, f->key) : prefix_index_remove(ix, txn, f->name.id);
}

static int forget(struct prefix_store *s, struct prefix_name n, const struct prefix_key *key)
{
    struct forgotten f = {n, key};
    int mdb = prefix_index_change(&s->index, forget_apply, &f);
    if (!mdb) file_unlink(s, n);
    return mdb;
}

/* Where a load stands. */
struct reading {
    struct prefix_store *s;
    struct prompt *p;
    uint64_t *ids; /* of blocks, then of the state; equal ones follow one another */
    size_t n_ids;
    struct prefix_name open; /* the file in s->payload, fd >= 0 */
    int fd;
};

static void reading_close(struct reading *r)
{
    if (r->fd >= 0) close(r->fd);
    r->fd = -1;
}

/* Is the open file the prompt's, up to the end of block? */
static bool file_is_prompts(struct reading *r, int block, size_t item_bytes)
{
    const struct prefix_payload *f = &r->s->payload;
    unsigned char before[PREFIX_DIGEST_BYTES];
    int first = (int)f->h.first_block;
    if (memcmp(&f->h.fingerprint, &r->s->o.fingerprint, sizeof f->h.fingerprint) || f->h.item_bytes != item_bytes) return false;
    if (block < first || block - first >= (int)f->h.n_blocks) return false;
    size_t n = (size_t)(block - first + 1) * PREFIX_BLOCK_TOKENS;
    if (memcmp(f->tokens, r->p->tokens + (size_t)first * PREFIX_BLOCK_TOKENS, n * sizeof *f->tokens)) return false;
    prompt_digest(r->p, first, before);
    return !memcmp(before, f->h.before, sizeof before);
}

/* Reads a block or the state at its end into scratch. */
static bool item_read(struct reading *r, struct prefix_name n, int block)
{
    struct prefix_store *s = r->s;
    size_t item_bytes = n.kind == PREFIX_STATE ? s->o.state_bytes : s->o.block_bytes;
    enum prefix_verdict verdict = PREFIX_WHOLE;
    if (r->fd < 0 || r->open.id != n.id || r->open.kind != n.kind) {
        reading_close(r);
        verdict = prefix_payload_open(s->folder_fd, n, &s->payload, &r->fd);
        r->open = n;
    }
    if (verdict == PREFIX_WHOLE && file_is_prompts(r, block, item_bytes)) {
        uint32_t item = n.kind == PREFIX_STATE ? 0 : (uint32_t)block - s->payload.h.first_block;
        if (prefix_payload_item(r->fd, &s->payload, item, s->scratch)) return true;
    }
    reading_close(r);
    if (verdict != PREFIX_UNREADABLE) forget(s, n, &r->p->keys[block]);
    return false;
}

/* Where everything lies that a load needs; false: something is not there. */
static bool load_find(struct reading *r, int from_block)
{
    struct prefix_index *ix = &r->s->index;
    const struct prompt *p = r->p;
    MDB_txn *txn;
    if (prefix_index_read(ix, &txn)) return false;
    bool found = true;
    for (int b = from_block; r->s->o.block_bytes && b < p->n_blocks && found; b++)
        found = prefix_index_find(ix, txn, PREFIX_KV, &p->keys[b], &r->ids[r->n_ids++]) == 0;
    if (found && r->s->o.state_bytes)
        found = prefix_index_find(ix, txn, PREFIX_STATE, &p->keys[p->n_blocks - 1], &r->ids[r->n_ids++]) == 0;
    mdb_txn_abort(txn);
    return found;
}

static bool load_read(struct reading *r, int from_block, const struct prefix_sink *sink)
{
    const struct prefix_store *s = r->s;
    size_t i = 0;
    for (int b = from_block; s->o.block_bytes && b < r->p->n_blocks; b++) {
        if (!item_read(r, (struct prefix_name){r->ids[i++], PREFIX_KV}, b)) return false;
        sink->block(sink->ctx, b, s->scratch);
    }
    if (!s->o.state_bytes) return true;
    if (!item_read(r, (struct prefix_name){r->ids[i], PREFIX_STATE}, r->p->n_blocks - 1)) return false;
    sink->state(sink->ctx, s->scratch);
    return true;
}

struct touched {
    const uint64_t *ids;
    size_t n;
};

static int touch_apply(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    const struct touched *t = ctx;
    return prefix_index_touch(ix, txn, t->ids, t->n);
}

static int touch(struct prefix_store *s, uint64_t *ids, size_t n)
{
    size_t unique = 0;
    for (size_t i = 0; i < n; i++)
        if (!unique || ids[unique - 1] != ids[i]) ids[unique++] = ids[i];
    struct touched t = {ids, unique};
    return unique ? prefix_index_change(&s->index, touch_apply, &t) : 0;
}

bool prefix_store_load(struct prefix_store *s, const int32_t *tokens, int from, int position, const struct prefix_sink *sink)
{
    struct prompt p;
    if (!position_possible(position) || from < 0 || from % PREFIX_BLOCK_TOKENS || from >= position) return false;
    if (!prompt_open(s, tokens, position / PREFIX_BLOCK_TOKENS, &p)) return false;
    struct reading r = {.s = s, .p = &p, .ids = calloc((size_t)p.n_blocks + 1, sizeof *r.ids), .fd = -1};
    bool loaded = r.ids && load_find(&r, from / PREFIX_BLOCK_TOKENS) && load_read(&r, from / PREFIX_BLOCK_TOKENS, sink);
    reading_close(&r);
    /* When it was used last is a hint; that it cannot be written is no reason to compute all of it again. */
    if (loaded) touch(s, r.ids, r.n_ids);
    free(r.ids);
    free(p.keys);
    return loaded;
}

/* ---- making room ---- */

static uint64_t above(uint64_t wanted, uint64_t allowed) { return wanted > allowed ? wanted - allowed : 0; }
static uint64_t sum(uint64_t a, uint64_t b) { return a > UINT64_MAX - b ? UINT64_MAX : a + b; }

/* A file to be put, from making room to the index's commit. */
struct putting {
    struct prefix_store *s;
    struct prefix_mark prompt;
    struct prefix_file file;
    int64_t next_use;
    uint64_t unwritten_bytes; /* that the disk does not hold yet */
    struct prefix_victims victims;
    bool full, taken; /* nothing may go; all its keys were another's */
};

static uint64_t bytes_to_free(const struct putting *p, uint64_t stored_bytes)
{
    const struct prefix_store_options *o = &p->s->o;
    struct statvfs fs;
    uint64_t need = o->quota_bytes ? above(sum(stored_bytes, p->file.bytes), o->quota_bytes) : 0;
    if (o->free_floor_bytes && fstatvfs(p->s->folder_fd, &fs) == 0) {
        uint64_t low = above(sum(o->free_floor_bytes, p->unwritten_bytes), (uint64_t)fs.f_bavail * fs.f_frsize);
        if (low > need) need = low;
    }
    return need;
}

/* PREFIX_NOTHING: there is room, or full. */
static int room_apply(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    struct putting *p = ctx;
    struct prefix_totals t;
    free(p->victims.at);
    p->victims = (struct prefix_victims){0};
    p->full = false;
    int mdb = prefix_index_totals(ix, txn, &t);
    if (mdb) return mdb;
    const struct prefix_demand d = {&p->s->marks, &p->prompt, p->next_use, bytes_to_free(p, t.bytes), 0};
    if (!d.bytes) return PREFIX_NOTHING;
    mdb = prefix_evict(ix, txn, &d, &p->victims);
    p->full = mdb == PREFIX_NOTHING;
    return mdb;
}

static int insert_apply(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    struct putting *p = ctx;
    /* Others may have put something since room was made. */
    int mdb = room_apply(ix, txn, ctx);
    if (mdb == PREFIX_NOTHING && !p->full) mdb = 0;
    if (!mdb) {
        mdb = prefix_index_add(ix, txn, &p->file);
        p->taken = mdb == PREFIX_NOTHING;
    }
    return mdb ? mdb : prefix_index_touch(ix, txn, &p->file.id, 1);
}

/* Applies and, once it is committed, unlinks what had to go. */
static enum rc put_change(struct putting *p, prefix_change_fn apply, struct err *e)
{
    int mdb = prefix_index_change(&p->s->index, apply, p);
    for (size_t i = 0; i < p->victims.n && !mdb && !p->full && !p->taken; i++) file_unlink(p->s, p->victims.at[i]);
    free(p->victims.at);
    p->victims = (struct prefix_victims){0};
    if (mdb) return prefix_index_error(mdb, "cannot change it", e);
    return p->full ? err_set(e, RC_RETRY, EXIT_DONE, "store_full", "the cache is full") : RC_OK;
}

/* ---- putting ---- */

struct items {
    const struct prefix_source *source;
    uint32_t first_block;
    enum prefix_kind kind;
};

static void item_fill(void *ctx, uint32_t i, void *out)
{
    const struct items *at = ctx;
    if (at->kind == PREFIX_STATE)
        at->source->state(at->source->ctx, out);
    else
        at->source->block(at->source->ctx, (int)(at->first_block + i), out);
}

static void payload_head(struct prefix_store *s, struct prompt *p, enum prefix_kind kind, int first, int n)
{
    struct prefix_payload *f = &s->payload;
    f->h = (struct prefix_header){
        .kind = (uint32_t)kind,
        .fingerprint = s->o.fingerprint,
        .parent = *key_before(s, p, first),
        .first_block = (uint32_t)first,
        .n_blocks = (uint32_t)n,
        .item_bytes = kind == PREFIX_STATE ? s->o.state_bytes : s->o.block_bytes,
    };
    prompt_digest(p, first, f->h.before);
    size_t tokens = (size_t)n * PREFIX_BLOCK_TOKENS;
    memcpy(f->tokens, p->tokens + (size_t)first * PREFIX_BLOCK_TOKENS, tokens * sizeof *f->tokens);
}

/* One file: blocks [first, first + n), or the state after block first. */
static enum rc file_put(struct prefix_store *s, struct prompt *p, enum prefix_kind kind, int first, int n,
                        const struct prefix_source *source, struct err *e)
{
    struct putting put = {.s = s,
                          .prompt = {p->keys, p->n_blocks, 0},
                          .file = {.kind = (uint32_t)kind, .first_block = (uint32_t)first, .n_blocks = (uint32_t)n},
                          .next_use = prefix_marks_next_use(&s->marks, &p->keys[first], first + 1)};
    struct items items = {source, (uint32_t)first, kind};
    payload_head(s, p, kind, first, n);
    memcpy(put.file.keys, &p->keys[first], (size_t)n * sizeof *p->keys);
    if (!prefix_payload_bytes(&s->payload.h, &put.file.bytes))
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "bad_put", "a file of the cache cannot be that long");
    if (getrandom(&put.file.id, sizeof put.file.id, 0) != (ssize_t)sizeof put.file.id)
        return err_errno(e, RC_FAILED, EXIT_INTERNAL, "no_random", "no random numbers");
    struct prefix_name name = {put.file.id, kind};
    put.unwritten_bytes = put.file.bytes;
    enum rc rc = put_change(&put, room_apply, e);
    if (rc == RC_OK) rc = prefix_payload_write(s->folder_fd, name, &s->payload, item_fill, &items, s->scratch, e);
    if (rc != RC_OK) return rc;
    put.unwritten_bytes = 0;
    rc = put_change(&put, insert_apply, e);
    if (rc != RC_OK || put.taken) file_unlink(s, name);
    return rc;
}

static int blocks_of_a_file(const struct prefix_store *s)
{
    size_t n = file_wanted_bytes / (s->o.block_bytes + 1);
    return n < 1 ? 1 : n > PREFIX_FILE_BLOCKS ? PREFIX_FILE_BLOCKS : (int)n;
}

/* ids[n_blocks + 1]: of what is there, the state last; 0 where nothing is. */
static int put_look(struct prefix_store *s, const struct prompt *p, uint64_t *ids)
{
    MDB_txn *txn;
    struct prefix_file f;
    int mdb = prefix_index_read(&s->index, &txn);
    if (mdb) return mdb;
    for (int b = 0; b <= p->n_blocks && !mdb; b++) {
        bool state = b == p->n_blocks;
        ids[b] = 0;
        mdb = prefix_index_find(&s->index, txn, state ? PREFIX_STATE : PREFIX_KV, &p->keys[state ? b - 1 : b], &ids[b]);
        if (!mdb) mdb = prefix_index_file(&s->index, txn, ids[b], &f);
        if (mdb == MDB_NOTFOUND) mdb = 0, ids[b] = 0;
    }
    mdb_txn_abort(txn);
    return mdb;
}

static enum rc missing_put(struct prefix_store *s, struct prompt *p, const uint64_t *ids, const struct prefix_source *source,
                           struct err *e)
{
    enum rc rc = RC_OK;
    int most = blocks_of_a_file(s);
    for (int b = 0; s->o.block_bytes && b < p->n_blocks && rc == RC_OK;) {
        int n = 0;
        while (b + n < p->n_blocks && n < most && !ids[b + n]) n++;
        if (n) rc = file_put(s, p, PREFIX_KV, b, n, source, e);
        b += n ? n : 1;
    }
    if (rc == RC_OK && s->o.state_bytes && source->state && !ids[p->n_blocks])
        rc = file_put(s, p, PREFIX_STATE, p->n_blocks - 1, 1, source, e);
    return rc;
}

/* What a put finds or leaves in the store has been used just now, all of it alike: so its end goes before its beginning. */
static int put_touch(struct prefix_store *s, const struct prompt *p, uint64_t *ids)
{
    int mdb = put_look(s, p, ids);
    size_t n = 0;
    for (int b = 0; b <= p->n_blocks; b++)
        if (ids[b]) ids[n++] = ids[b];
    return mdb ? mdb : touch(s, ids, n);
}

enum rc prefix_store_put(struct prefix_store *s, const int32_t *tokens, int position, const struct prefix_source *source,
                         struct err *e)
{
    struct prompt p;
    if (!position_possible(position))
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "bad_put", "%d is no position for the cache", position);
    if (!prompt_open(s, tokens, position / PREFIX_BLOCK_TOKENS, &p)) return err_no_memory(e);
    uint64_t *ids = calloc((size_t)p.n_blocks + 1, sizeof *ids);
    int mdb = ids ? put_look(s, &p, ids) : ENOMEM;
    enum rc rc = mdb ? prefix_index_error(mdb, "cannot read it", e) : missing_put(s, &p, ids, source, e);
    /* As after a load: a hint. */
    if (rc == RC_OK || rc == RC_RETRY) put_touch(s, &p, ids);
    else err_place(e, s->folder, 0, 0, 0);
    free(ids);
    free(p.keys);
    return rc;
}

enum rc prefix_store_mark(struct prefix_store *s, const int32_t *tokens, int position, int64_t next_use, struct err *e)
{
    struct prompt p;
    if (!position_possible(position))
        return err_set(e, RC_BAD_INPUT, EXIT_INTERNAL, "bad_mark", "%d is no position for the cache", position);
    if (!prompt_open(s, tokens, position / PREFIX_BLOCK_TOKENS, &p)) return err_no_memory(e);
    return prefix_marks_set(&s->marks, p.keys, p.n_blocks, next_use, e);
}

/* ---- care ---- */

static int stat_add(void *ctx, const struct prefix_file *f)
{
    struct prefix_stat *s = ctx;
    s->files++;
    s->bytes += f->bytes;
    if (f->kind == PREFIX_STATE)
        s->states++;
    else
        s->blocks += f->n_blocks;
    if (!s->oldest_use_us || f->last_use_us < s->oldest_use_us) s->oldest_use_us = f->last_use_us;
    if (f->last_use_us > s->newest_use_us) s->newest_use_us = f->last_use_us;
    return 0;
}

static int each_file(struct prefix_store *s, int (*fn)(void *ctx, const struct prefix_file *f), void *ctx)
{
    MDB_txn *txn;
    int mdb = prefix_index_read(&s->index, &txn);
    if (mdb) return mdb;
    mdb = prefix_index_each(&s->index, txn, fn, ctx);
    mdb_txn_abort(txn);
    return mdb;
}

enum rc prefix_store_stat(struct prefix_store *s, struct prefix_stat *out, struct err *e)
{
    *out = (struct prefix_stat){0};
    int mdb = each_file(s, stat_add, out);
    return mdb ? prefix_index_error(mdb, "cannot read it", e) : RC_OK;
}

static int record_append(void *ctx, const struct prefix_file *f)
{
    return buf_append(ctx, f, sizeof *f) ? 0 : ENOMEM;
}

static bool record_matches(const struct prefix_file *f, const struct prefix_payload *p)
{
    struct prefix_key keys[PREFIX_FILE_BLOCKS];
    if (p->h.first_block != f->first_block || p->h.n_blocks != f->n_blocks) return false;
    prefix_payload_keys(p, keys);
    return !memcmp(keys, f->keys, f->n_blocks * sizeof *keys);
}

/* Another process may have evicted it since the records were read. */
static bool still_there(struct prefix_store *s, uint64_t id)
{
    MDB_txn *txn;
    struct prefix_file f;
    if (prefix_index_read(&s->index, &txn)) return true;
    bool there = prefix_index_file(&s->index, txn, id, &f) == 0;
    mdb_txn_abort(txn);
    return there;
}

/* PREFIX_UNREADABLE: nothing can be said. */
static enum prefix_verdict file_verify(struct prefix_store *s, const struct prefix_file *f)
{
    int fd;
    enum prefix_verdict verdict =
        prefix_payload_open(s->folder_fd, (struct prefix_name){f->id, (enum prefix_kind)f->kind}, &s->payload, &fd);
    if (verdict != PREFIX_WHOLE) return verdict;
    if (!record_matches(f, &s->payload)) verdict = PREFIX_WRONG;
    /* No more than the file's length, which the header agrees with. */
    void *item = malloc(s->payload.h.item_bytes + 1);
    if (!item) verdict = PREFIX_UNREADABLE;
    for (uint32_t i = 0; i < prefix_payload_items(&s->payload.h) && verdict == PREFIX_WHOLE; i++)
        if (!prefix_payload_item(fd, &s->payload, i, item)) verdict = PREFIX_WRONG;
    free(item);
    close(fd);
    return verdict;
}

static void count_add(struct prefix_count *c, uint64_t bytes)
{
    c->files++;
    c->bytes += bytes;
}

enum rc prefix_store_verify(struct prefix_store *s, struct prefix_count *read, struct prefix_count *deleted, struct err *e)
{
    struct buf records = {0};
    *read = *deleted = (struct prefix_count){0};
    int mdb = each_file(s, record_append, &records);
    for (size_t at = 0; at < records.len && !mdb; at += sizeof(struct prefix_file)) {
        struct prefix_file f;
        memcpy(&f, records.data + at, sizeof f);
        enum prefix_verdict verdict = file_verify(s, &f);
        if (verdict == PREFIX_UNREADABLE) mdb = ENOMEM;
        if (verdict == PREFIX_WRONG && !still_there(s, f.id)) continue;
        if (verdict == PREFIX_WRONG) mdb = forget(s, (struct prefix_name){f.id, (enum prefix_kind)f.kind}, NULL);
        count_add(verdict == PREFIX_WRONG ? deleted : read, f.bytes);
    }
    buf_free(&records);
    return mdb ? prefix_index_error(mdb, "cannot verify", e) : RC_OK;
}

struct pruning {
    struct prefix_store *s;
    uint64_t target_bytes, unused_since_us;
    struct prefix_victims victims;
};

static int prune_apply(struct prefix_index *ix, MDB_txn *txn, void *ctx)
{
    struct pruning *p = ctx;
    struct prefix_stat stat = {0};
    free(p->victims.at);
    p->victims = (struct prefix_victims){0};
    int mdb = prefix_index_each(ix, txn, stat_add, &stat);
    if (mdb) return mdb;
    const struct prefix_demand d = {.marks = &p->s->marks,
                                    .next_use = INT64_MIN,
                                    .bytes = above(stat.bytes, p->target_bytes),
                                    .unused_since_us = p->unused_since_us};
    return prefix_evict(ix, txn, &d, &p->victims);
}

enum rc prefix_store_prune(struct prefix_store *s, uint64_t target_bytes, uint64_t unused_since_us, struct prefix_count *deleted,
                           struct err *e)
{
    struct pruning p = {.s = s, .target_bytes = target_bytes, .unused_since_us = unused_since_us};
    int mdb = prefix_index_change(&s->index, prune_apply, &p);
    *deleted = (struct prefix_count){0};
    if (!mdb) *deleted = (struct prefix_count){p.victims.n, p.victims.bytes};
    for (size_t i = 0; i < p.victims.n && !mdb; i++) file_unlink(s, p.victims.at[i]);
    free(p.victims.at);
    return mdb ? prefix_index_error(mdb, "cannot prune it", e) : RC_OK;
}
