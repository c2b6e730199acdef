/* lmdb_pages: pages of 16 bytes of header, then offsets of nodes, nodes from the end; two meta pages first, of which the one with the
 * greater transaction counts. A branch's node leads to a page, a leaf's holds key and value, or the number of the pages that hold
 * the value, or (in the unnamed tree) a table.
 *
 * What LMDB leaves unchecked and a change would act upon: a page's own number, which is what gets freed; where its free space
 * begins; the sizes of nodes, which lie without gaps; the last page of the file; the list of free
 * pages. All of it follows from the trees and is compared with them. An old meta page with a damaged number would bring the past
 * back: two transactions in a row differ by one, and each lists what it freed. */
#define _GNU_SOURCE
#include "lmdb_pages.h"

#include <assert.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static_assert(sizeof(size_t) == 8 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "LMDB's files are of the machine's make");

enum { HEADER_BYTES = 16, NODE_BYTES = 8, TABLE_BYTES = 48, DEEPEST = 32 };
enum { PAGE_BRANCH = 1, PAGE_LEAF = 2, PAGE_OVERFLOW = 4 };
enum { NODE_OVERFLOW = 1, NODE_TABLE = 2 };
enum { TREE_INTEGER_KEYS = 8 };
static const uint32_t meta_magic = 0xBEEFC0DE, meta_version = 1;
static const uint64_t no_page = UINT64_MAX;

/* What LMDB keeps of a tree. */
struct tree {
    uint64_t pad, flags, depth, branches, leaves, overflows, entries, root;
};

struct meta {
    bool good;
    struct tree free, main;
    uint64_t last_page, txn_id;
};

static uint64_t load(const unsigned char *at, size_t n_bytes)
{
    uint64_t v = 0;
    memcpy(&v, at, n_bytes);
    return v;
}

static struct tree tree_read(const unsigned char *at)
{
    return (struct tree){load(at, 4), load(at + 4, 2), load(at + 6, 2), load(at + 8, 8), load(at + 16, 8), load(at + 24, 8),
                         load(at + 32, 8), load(at + 40, 8)};
}

/* ---- the file ---- */

/* What the meta page at this offset says, if it is one. */
static uint32_t page_bytes_at(const unsigned char *bytes, size_t n_bytes, size_t offset)
{
    if (offset + HEADER_BYTES + 136 > n_bytes) return 0;
    const unsigned char *m = bytes + offset + HEADER_BYTES;
    const uint32_t page_bytes = (uint32_t)load(m + 24, 4);
    if (load(m, 4) != meta_magic || load(m + 4, 4) != meta_version) return 0;
    return page_bytes >= 512 && page_bytes <= 65536 && (page_bytes & (page_bytes - 1)) == 0 ? page_bytes : 0;
}

enum rc lmdb_pages_open(const char *path, struct lmdb_pages *out, struct err *e)
{
    struct stat st = {0};
    *out = (struct lmdb_pages){0};
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &st)) {
        const enum rc rc = err_errno(e, RC_FAILED, EXIT_IO, "cannot_open", "cannot open %s", path);
        if (fd >= 0) close(fd);
        return rc;
    }
    const size_t n_bytes = S_ISREG(st.st_mode) && st.st_size > 0 ? (size_t)st.st_size : 0;
    void *map = n_bytes ? mmap(NULL, n_bytes, PROT_READ, MAP_SHARED, fd, 0) : MAP_FAILED;
    close(fd);
    if (!n_bytes) return err_set(e, RC_FAILED, EXIT_IO, "cannot_open", "%s is empty or no file", path);
    if (map == MAP_FAILED) return err_errno(e, RC_FAILED, EXIT_IO, "cannot_open", "cannot map %s", path);
    out->bytes = map;
    out->n_bytes = n_bytes;
    out->page_bytes = page_bytes_at(map, n_bytes, 0);
    for (size_t at = 512; !out->page_bytes && at <= 65536; at *= 2)
        if (page_bytes_at(map, n_bytes, at) == at) out->page_bytes = at;
    out->known = out->page_bytes > 0;
    if (!out->known) out->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    out->n_pages = n_bytes / out->page_bytes;
    return RC_OK;
}

void lmdb_pages_close(struct lmdb_pages *p)
{
    if (p->bytes) munmap((void *)(uintptr_t)p->bytes, p->n_bytes);
    *p = (struct lmdb_pages){0};
}

static struct meta meta_read(const struct lmdb_pages *p, size_t which)
{
    struct meta m = {0};
    if (which >= p->n_pages) return m;
    const unsigned char *b = p->bytes + which * p->page_bytes + HEADER_BYTES;
    m.good = load(b, 4) == meta_magic && load(b + 4, 4) == meta_version;
    m.free = tree_read(b + 24);
    m.main = tree_read(b + 72);
    m.last_page = load(b + 120, 8);
    m.txn_id = load(b + 128, 8);
    return m;
}

/* ---- one page ---- */

struct node {
    unsigned flags;
    uint64_t child; /* of a branch */
    struct bytes_view key, value;
};

static const unsigned char *page_at(const struct lmdb_pages *p, uint64_t number)
{
    return number >= 2 && number < p->n_pages ? p->bytes + number * p->page_bytes : NULL;
}

static unsigned page_flags(const unsigned char *page) { return (unsigned)load(page + 10, 2); }

/* Nodes of a page, 0 when its header is impossible. */
static size_t page_nodes(const struct lmdb_pages *p, const unsigned char *page)
{
    const size_t lower = load(page + 12, 2), upper = load(page + 14, 2);
    return lower >= HEADER_BYTES && lower <= upper && upper <= p->page_bytes && lower % 2 == 0 ? (lower - HEADER_BYTES) / 2 : 0;
}

/* What a node takes of its page. */
static size_t node_bytes(const struct node *node, bool branch)
{
    const size_t inside = branch ? 0 : node->flags & NODE_OVERFLOW ? 8 : node->value.len;
    return (NODE_BYTES + node->key.len + inside + 1) / 2 * 2;
}

/* first, n: the overflow pages of the node, if it has any. */
static bool node_read(const struct lmdb_pages *p, const unsigned char *page, size_t i, struct node *out, uint64_t *first, uint64_t *n)
{
    const size_t at = load(page + HEADER_BYTES + 2 * i, 2);
    *n = 0;
    if (at < load(page + 14, 2) || at + NODE_BYTES > p->page_bytes) return false;
    const unsigned char *node = page + at;
    const size_t key_len = load(node + 6, 2), room = p->page_bytes - at - NODE_BYTES;
    if (key_len > room) return false;
    *out = (struct node){.flags = (unsigned)load(node + 4, 2), .key = {node + NODE_BYTES, key_len}};
    const size_t len = load(node, 4);
    if (page_flags(page) & PAGE_BRANCH) {
        out->child = len | (uint64_t)out->flags << 32;
        return true;
    }
    const unsigned char *inside = node + NODE_BYTES + key_len;
    if (!(out->flags & NODE_OVERFLOW)) {
        out->value = (struct bytes_view){inside, len};
        return len <= room - key_len;
    }
    if (room - key_len < 8) return false;
    *first = load(inside, 8);
    const unsigned char *value = page_at(p, *first);
    if (!value || !(page_flags(value) & PAGE_OVERFLOW)) return false;
    *n = load(value + 12, 4);
    if (*n == 0 || *n > p->n_pages - *first || len > *n * p->page_bytes - HEADER_BYTES) return false;
    out->value = (struct bytes_view){value + HEADER_BYTES, len};
    return true;
}

/* ---- trees ---- */

struct walk {
    const struct lmdb_pages *p;
    unsigned char *used; /* a bit for every page that was seen: none is walked twice */
    bool whole;
    struct tree seen; /* of the tree at hand; its flags say how keys compare */
    lmdb_pages_fn fn;
    void *ctx;
    const char *only; /* the one table to walk; NULL: all */
    bool in_table, found;
};

/* False: seen before, or outside. */
static bool page_take(struct walk *w, uint64_t number)
{
    if (!page_at(w->p, number) || w->used[number / 8] >> number % 8 & 1) return false;
    w->used[number / 8] |= (unsigned char)(1 << number % 8);
    return true;
}

static int key_compare(const struct walk *w, struct bytes_view a, struct bytes_view b)
{
    if (w->seen.flags & TREE_INTEGER_KEYS) {
        const uint64_t x = a.len == 8 ? load(a.bytes, 8) : 0, y = b.len == 8 ? load(b.bytes, 8) : 0;
        return (x > y) - (x < y);
    }
    const int c = memcmp(a.bytes, b.bytes, a.len < b.len ? a.len : b.len);
    return c ? c : (a.len > b.len) - (a.len < b.len);
}

/* Keys of the page at `number` lie in [from, to); NULL: no bound. */
static void page_walk(struct walk *w, uint64_t number, uint64_t depth, const struct bytes_view *from, const struct bytes_view *to);

/* A tree that should have these flags; what it says of itself is compared with what it has. */
static void tree_walk(struct walk *w, const struct tree *t, uint64_t pad, uint64_t flags)
{
    const struct tree outer = w->seen;
    w->seen = (struct tree){.pad = pad, .flags = flags, .root = t->root};
    if (t->root != no_page) page_walk(w, t->root, 1, NULL, NULL);
    if (memcmp(&w->seen, t, sizeof *t)) w->whole = false;
    w->seen = outer;
}

static void table_walk(struct walk *w, const struct node *node)
{
    if (w->in_table || node->value.len != TABLE_BYTES) {
        w->whole = false;
        return;
    }
    const struct tree t = tree_read(node->value.bytes);
    if (w->only && (strlen(w->only) != node->key.len || memcmp(w->only, node->key.bytes, node->key.len))) return;
    w->found = w->in_table = true;
    tree_walk(w, &t, 0, 0);
    w->in_table = false;
}

static void leaf_node(struct walk *w, const struct node *node, uint64_t first, uint64_t n)
{
    w->seen.entries++;
    w->seen.overflows += n;
    for (uint64_t k = 0; k < n; k++)
        if (!page_take(w, first + k)) w->whole = false;
    if (n && load(page_at(w->p, first), 8) != first) w->whole = false;
    if (node->flags & NODE_TABLE) table_walk(w, node);
    else w->fn(w->ctx, node->key, node->value);
}

static void page_walk(struct walk *w, uint64_t number, uint64_t depth, const struct bytes_view *from, const struct bytes_view *to)
{
    const struct lmdb_pages *p = w->p;
    const unsigned char *page = page_at(p, number);
    if (depth > DEEPEST || !page_take(w, number)) {
        w->whole = false;
        return;
    }
    const size_t n = page_nodes(p, page);
    const bool branch = page_flags(page) == PAGE_BRANCH;
    size_t lowest = p->page_bytes, taken = 0;
    if (depth > w->seen.depth) w->seen.depth = depth;
    w->seen.branches += branch;
    w->seen.leaves += !branch;
    if (!n || load(page, 8) != number || (!branch && page_flags(page) != PAGE_LEAF)) w->whole = false;
    if (!branch && !(page_flags(page) & PAGE_LEAF)) return;
    struct bytes_view before = {0};
    for (size_t i = 0; i < n; i++) {
        struct node node, next;
        uint64_t first, n_value, ignored;
        const size_t at = load(page + HEADER_BYTES + 2 * i, 2);
        if (at < lowest) lowest = at;
        if (!node_read(p, page, i, &node, &first, &n_value)) {
            w->whole = false;
            continue;
        }
        taken += node_bytes(&node, branch);
        /* The first key of a branch is not used. */
        const bool keyed = !branch || i > 0;
        if (keyed && ((from && key_compare(w, node.key, *from) < 0) || (to && key_compare(w, node.key, *to) >= 0) ||
                      (before.bytes && key_compare(w, before, node.key) >= 0)))
            w->whole = false;
        if (keyed) before = node.key;
        if (branch) {
            const bool last = i + 1 == n || !node_read(p, page, i + 1, &next, &first, &ignored);
            page_walk(w, node.child, depth + 1, keyed ? &node.key : from, last ? to : &next.key);
        } else {
            leaf_node(w, &node, first, n_value);
        }
    }
    if (n && (lowest != load(page + 14, 2) || taken != p->page_bytes - lowest)) w->whole = false;
}

static bool walk_start(const struct lmdb_pages *p, struct walk *w)
{
    free(w->used);
    w->used = calloc(p->n_pages / 8 + 1, 1);
    return w->used != NULL;
}

bool lmdb_pages_table(const struct lmdb_pages *p, bool newest, const char *name, lmdb_pages_fn fn, void *ctx)
{
    const struct meta m[2] = {meta_read(p, 0), meta_read(p, 1)};
    const bool second = m[1].good && (!m[0].good || m[1].txn_id > m[0].txn_id);
    const struct meta *at = &m[newest == second];
    struct walk w = {.p = p, .whole = true, .fn = fn, .ctx = ctx, .only = name};
    if (!at->good || !walk_start(p, &w)) return false;
    tree_walk(&w, &at->main, 0, 0);
    free(w.used);
    const bool neighbours = m[0].good && m[1].good && (m[0].txn_id + 1 == m[1].txn_id || m[1].txn_id + 1 == m[0].txn_id);
    return w.whole && w.found && neighbours;
}

void lmdb_pages_scan(const struct lmdb_pages *p, lmdb_pages_fn fn, void *ctx)
{
    for (uint64_t number = 2; number < p->n_pages; number++) {
        const unsigned char *page = page_at(p, number);
        for (size_t i = 0, n = page_flags(page) == PAGE_LEAF ? page_nodes(p, page) : 0; i < n; i++) {
            struct node node;
            uint64_t first, n_value;
            if (node_read(p, page, i, &node, &first, &n_value) && !(node.flags & NODE_TABLE))
                fn(ctx, node.key, node.value);
        }
    }
}

/* ---- the check ---- */

static void entry_ignore(void *ctx, struct bytes_view key, struct bytes_view value) { (void)ctx, (void)key, (void)value; }

/* The lists of free pages against the pages in use. */
struct free_check {
    unsigned char *used;
    uint64_t last_page, newest;
    bool good;
};

static void free_list(void *ctx, struct bytes_view key, struct bytes_view value)
{
    struct free_check *c = ctx;
    const unsigned char *at = value.bytes;
    c->good = c->good && key.len == 8 && value.len >= 8 && value.len % 8 == 0 && load(at, 8) <= value.len / 8 - 1;
    if (!c->good) return;
    const uint64_t n = load(at, 8);
    if (load(key.bytes, 8) > c->newest) c->newest = load(key.bytes, 8);
    for (uint64_t i = 1; i <= n && c->good; i++) {
        const uint64_t number = load(at + 8 * i, 8);
        c->good = number >= 2 && number <= c->last_page && !(c->used[number / 8] >> number % 8 & 1);
        if (c->good) c->used[number / 8] |= (unsigned char)(1 << number % 8);
    }
}

static bool free_pages_sound(const struct lmdb_pages *p, const struct meta *m, const unsigned char *used)
{
    const size_t pages = p->n_pages > m->last_page ? p->n_pages : m->last_page + 1;
    struct free_check c = {calloc(pages / 8 + 1, 1), m->last_page, 0, true};
    struct walk again = {.p = p, .whole = true, .fn = free_list, .ctx = &c};
    bool good = c.used && walk_start(p, &again);
    if (good) memcpy(c.used, used, p->n_pages / 8 + 1);
    if (good) tree_walk(&again, &m->free, p->page_bytes, TREE_INTEGER_KEYS);
    /* A page that was freed before it was ever written may lie behind the file's end. */
    for (uint64_t number = p->n_pages; good && c.good && number <= m->last_page; number++) c.good = c.used[number / 8] >> number % 8 & 1;
    /* The very first transaction frees nothing. */
    good = good && c.good && (c.newest == m->txn_id || (m->txn_id == 1 && m->free.root == no_page));
    free(again.used);
    free(c.used);
    return good;
}

/* The meta page of a transaction, and whether the other one is its neighbour. */
static enum lmdb_verdict meta_check(const struct lmdb_pages *p, uint64_t txn_id, struct meta *out)
{
    const struct meta other = meta_read(p, !(txn_id & 1));
    *out = meta_read(p, txn_id & 1);
    const uint64_t now = meta_read(p, txn_id & 1).txn_id; /* a writer may have been at it */
    if (out->good && (out->txn_id > txn_id || now > txn_id)) return LMDB_UNREADABLE;
    /* No more pages than the file could list. */
    const bool possible = out->good && other.good && out->last_page < p->n_pages * (p->page_bytes / 8);
    const bool neighbours = out->txn_id == txn_id && (other.txn_id == txn_id - 1 || other.txn_id == txn_id + 1);
    return possible && neighbours ? LMDB_GOOD : LMDB_DAMAGED;
}

/* The last key of the list of free pages; 0: none, or it cannot be found. */
static uint64_t last_freed(const struct lmdb_pages *p, uint64_t number)
{
    for (int depth = 0; depth < DEEPEST && page_at(p, number); depth++) {
        const unsigned char *page = page_at(p, number);
        const size_t n = page_nodes(p, page);
        struct node node;
        uint64_t first, n_value;
        if (!n || !node_read(p, page, n - 1, &node, &first, &n_value)) return 0;
        if (!(page_flags(page) & PAGE_BRANCH)) return node.key.len == 8 ? load(node.key.bytes, 8) : 0;
        number = node.child;
    }
    return 0;
}

enum lmdb_verdict lmdb_pages_newest(const struct lmdb_pages *p, uint64_t txn_id)
{
    struct meta m;
    if (!p->known) return LMDB_GOOD;
    const enum lmdb_verdict verdict = meta_check(p, txn_id, &m);
    if (verdict != LMDB_GOOD) return verdict;
    /* The very first transaction frees nothing. */
    return last_freed(p, m.free.root) == txn_id || (txn_id == 1 && m.free.root == no_page) ? LMDB_GOOD : LMDB_DAMAGED;
}

enum lmdb_verdict lmdb_pages_check(const struct lmdb_pages *p, uint64_t txn_id)
{
    struct meta m;
    struct walk w = {.p = p, .whole = true, .fn = entry_ignore};
    if (!p->known) return LMDB_GOOD;
    const enum lmdb_verdict verdict = meta_check(p, txn_id, &m);
    if (verdict != LMDB_GOOD) return verdict;
    if (!walk_start(p, &w)) return LMDB_DAMAGED;
    tree_walk(&w, &m.main, 0, 0);
    tree_walk(&w, &m.free, p->page_bytes, TREE_INTEGER_KEYS);
    for (uint64_t number = m.last_page + 1; number < p->n_pages && w.whole; number++)
        w.whole = !(w.used[number / 8] >> number % 8 & 1);
    const bool sound = w.whole && free_pages_sound(p, &m, w.used);
    free(w.used);
    return sound ? LMDB_GOOD : LMDB_DAMAGED;
}
