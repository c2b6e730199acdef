/* lockstep: the shared segment, the plan and the record.
 *
 * The creator owns the memory; ranks borrow it. segment_attach proves once that every size in the header fits what was
 * mapped, and later code relies on it.
 *
 * Poison has no half-written moment: each author (a rank, or the runner) has its own reason, filled once, and only then
 * tries to put itself into the poison word. The first compare-and-swap wins and its release makes the reason readable.
 * An author killed in between has poisoned nothing.
 *
 * Two plan slots by parity of the step: rank 0 writes plan n after it compared step n - 1, so every rank had published
 * its record of n - 1 and hence had read plan n - 1, let alone n - 2, whose slot is written. (One slot would do; with
 * two, the plan of the running step stays readable while the next one is made.)
 *
 * Two record slots: a rank writes its record of n + 2 after it compared n + 1, so every peer had published n + 1, which
 * a peer does only after it compared n, i.e. after it read the slot that is now written anew. For the same reason a
 * peer's counter is n or n + 1 when its record of n is awaited; anything else means a broken group. */
#define _GNU_SOURCE
#include "lockstep.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "lockstep_wait.h"

static const uint64_t segment_magic = UINT64_C(0x314745534d444e54); /* "TNDMSEG1" */

enum { SPIN_PAUSES = 5000, SPIN_PAUSES_CROWDED = 20, SPIN_PAUSES_MOST = 100000 };

struct lockstep_bounds lockstep_bounds_default(void)
{
    return (struct lockstep_bounds){.collective_us = 20000000, .lockstep_us = 40000000, .watchdog_us = 90000000};
}

enum rc lockstep_bounds_check(const struct lockstep_bounds *b, struct err *e)
{
    if (b->collective_us > 0 && b->collective_us < b->lockstep_us && b->lockstep_us < b->watchdog_us) return RC_OK;
    return err_set(e, RC_BAD_INPUT, EXIT_USAGE, "bad_bounds",
                   "timeouts must satisfy 0 < collective (%.3f s) < lockstep (%.3f s) < watchdog (%.3f s)",
                   (double)b->collective_us / 1e6, (double)b->lockstep_us / 1e6, (double)b->watchdog_us / 1e6);
}

bool segment_slot_stride(size_t comm_bytes, size_t *out)
{
    size_t n;
    if (!size_add(comm_bytes, sizeof(struct segment_slot) + 2 * SEGMENT_LINE_BYTES - 1, &n)) return false;
    *out = n / (2 * SEGMENT_LINE_BYTES) * (2 * SEGMENT_LINE_BYTES);
    return true;
}

struct segment_slot *segment_slot_of(struct segment *s, int rank, unsigned parity)
{
    size_t stride = 0;
    segment_slot_stride(s->comm_bytes, &stride);
    unsigned char *area = (unsigned char *)(s + 1);
    return (void *)(area + ((size_t)rank * 2 + parity) * stride);
}

size_t segment_bytes(int ranks, size_t comm_bytes)
{
    size_t stride, area, total;
    if (ranks < 1 || ranks > MAX_RANKS || !segment_slot_stride(comm_bytes, &stride)) return 0;
    if (!size_mul(stride, (size_t)ranks * 2, &area) || !size_add(area, sizeof(struct segment), &total)) return 0;
    return total;
}

void segment_init(void *memory, int ranks, size_t comm_bytes, const struct lockstep_bounds *b)
{
    struct segment *s = memory;
    s->version = SEGMENT_VERSION;
    s->ranks = (uint32_t)ranks;
    s->total_bytes = segment_bytes(ranks, comm_bytes);
    s->comm_bytes = comm_bytes;
    s->bounds = *b;
    /* With more ranks than cores the awaited rank may need the very core that the waiter spins on. */
    s->spin_pauses = sysconf(_SC_NPROCESSORS_ONLN) >= ranks ? SPIN_PAUSES : SPIN_PAUSES_CROWDED;
    s->magic = segment_magic;
}

struct segment *segment_attach(void *memory, size_t n_bytes, int ranks, struct err *e)
{
    const char *why = NULL;
    struct segment *s = memory;
    if (!memory || (uintptr_t)memory % alignof(struct segment))
        why = "not aligned to 64 bytes";
    else if (n_bytes < sizeof *s)
        why = "too small for its header";
    else if (s->magic != segment_magic)
        why = "not a segment";
    else if (s->version != SEGMENT_VERSION)
        why = "of another version";
    else if (ranks < 1 || ranks > MAX_RANKS || s->ranks != (uint32_t)ranks)
        why = "made for another number of ranks";
    else if (s->total_bytes != n_bytes)
        why = "of another size than what is mapped";
    else if (segment_bytes(ranks, s->comm_bytes) != n_bytes)
        why = "at odds with its own slot size";
    else if (s->spin_pauses > SPIN_PAUSES_MOST)
        why = "damaged (spin count)";
    else if (lockstep_bounds_check(&s->bounds, NULL) != RC_OK)
        why = "damaged (bounds)";
    if (!why) return s;
    err_set(e, RC_FATAL, EXIT_INTERNAL, "bad_segment", "the shared segment of %zu bytes is %s", n_bytes, why);
    return NULL;
}

struct lockstep_bounds segment_bounds(const struct segment *s) { return s->bounds; }

void segment_beat(struct segment *s, int rank)
{
    atomic_fetch_add_explicit(&s->rank[rank].beat, 1, memory_order_relaxed);
}

uint64_t segment_heartbeat(const struct segment *s, int rank)
{
    return atomic_load_explicit(&s->rank[rank].beat, memory_order_relaxed);
}

void segment_set_saved(struct segment *s, int rank, uint64_t batches)
{
    atomic_store_explicit(&s->rank[rank].saved.value, batches, memory_order_release);
}

uint64_t segment_saved(const struct segment *s, int rank)
{
    return atomic_load_explicit(&s->rank[rank].saved.value, memory_order_acquire);
}

void segment_poison(struct segment *s, int rank, const char *reason)
{
    uint32_t index = rank >= 0 && rank < MAX_RANKS ? (uint32_t)rank : MAX_RANKS, none = 0;
    struct segment_reason *mine = &s->reason[index];
    if (atomic_exchange(&mine->taken, 1)) return;
    snprintf(mine->text, sizeof mine->text, "%s", reason);
    atomic_compare_exchange_strong(&s->poison, &none, 1 + index);
    lockstep_wake_all(s);
}

bool segment_poisoned(const struct segment *s, int *rank, char *reason, size_t reason_bytes)
{
    uint32_t author = atomic_load_explicit(&s->poison, memory_order_acquire);
    if (!author) return false;
    if (author > MAX_RANKS + 1) author = MAX_RANKS + 1;
    if (rank) *rank = author == MAX_RANKS + 1 ? -1 : (int)author - 1;
    if (reason && reason_bytes)
        snprintf(reason, reason_bytes, "%.*s", SEGMENT_REASON_BYTES - 1, s->reason[author - 1].text);
    return true;
}

void lockstep_publish_plan(struct segment *s, uint64_t step, const void *plan, size_t n_bytes)
{
    if (n_bytes > LOCKSTEP_PLAN_BYTES) {
        segment_poison(s, 0, "a step plan is larger than its slot");
        return;
    }
    struct segment_plan *slot = &s->plan[step & 1];
    slot->step = step;
    slot->n_bytes = n_bytes;
    if (n_bytes) memcpy(slot->bytes, plan, n_bytes);
    lockstep_publish(s, 0, SEGMENT_PLAN, step);
}

/* A peer that is not where the protocol says: a program error or damaged memory, for the whole group. */
static enum rc fail_out_of_step(struct segment *s, int rank, const char *what, uint64_t step, uint64_t seen,
                                struct err *e)
{
    struct err mine = {0};
    err_set(&mine, RC_FATAL, EXIT_LOCKSTEP, "out_of_step", "%s of step %" PRIu64 " awaited, %" PRIu64 " found", what,
            step, seen);
    segment_poison(s, rank, mine.text);
    if (e && e->rc == RC_OK) *e = mine;
    return RC_FATAL;
}

enum rc lockstep_read_plan(struct segment *s, int rank, uint64_t step, int64_t patience_us, void *out,
                           size_t *out_bytes, struct err *e)
{
    struct segment_rank *me = &s->rank[rank];
    if (me->plan_step != step) {
        me->plan_step = step;
        me->plan_stall = (struct segment_stall){0};
    }
    struct lockstep_wait wait = {.self = rank,
                                 .peer = 0,
                                 .channel = SEGMENT_PLAN,
                                 .value = step,
                                 .bound_us = s->bounds.lockstep_us,
                                 .patience_us = patience_us < 0 ? 0 : patience_us,
                                 .what = "plan",
                                 .stall = &me->plan_stall};
    uint64_t seen;
    enum rc rc = lockstep_wait(s, &wait, &seen, e);
    if (rc != RC_OK) return rc;
    const struct segment_plan *slot = &s->plan[step & 1];
    if (seen != step || slot->step != step) return fail_out_of_step(s, rank, "plan", step, seen, e);
    if (slot->n_bytes > LOCKSTEP_PLAN_BYTES) return fail_out_of_step(s, rank, "plan", step, slot->n_bytes, e);
    *out_bytes = (size_t)slot->n_bytes;
    memcpy(out, slot->bytes, *out_bytes);
    return RC_OK;
}

struct record_field {
    const char *name;
    size_t offset;
    bool hash;
};
static const struct record_field record_fields[] = {
    {"step", offsetof(struct lockstep_record, step), false},
    {"plan_digest", offsetof(struct lockstep_record, plan_digest), true},
    {"rows", offsetof(struct lockstep_record, rows), false},
    {"tokens", offsetof(struct lockstep_record, tokens), false},
    {"token_hash", offsetof(struct lockstep_record, token_hash), true},
    {"position_sum", offsetof(struct lockstep_record, position_sum), false},
    {"state_digest", offsetof(struct lockstep_record, state_digest), true},
    {"flags", offsetof(struct lockstep_record, flags), true},
};
static_assert(sizeof record_fields / sizeof record_fields[0] * sizeof(uint64_t) == sizeof(struct lockstep_record),
              "every field is compared");

static uint64_t record_value(const struct lockstep_record *r, const struct record_field *f)
{
    uint64_t v;
    memcpy(&v, (const unsigned char *)r + f->offset, sizeof v);
    return v;
}

static void record_print(char *out, size_t out_bytes, const struct lockstep_record *r, const struct record_field *f)
{
    uint64_t v = record_value(r, f);
    if (f->hash)
        snprintf(out, out_bytes, "%016" PRIx64, v);
    else
        snprintf(out, out_bytes, "%" PRIu64, v);
}

static enum rc fail_lockstep(struct segment *s, const struct lockstep_record *of_rank[], int rank, int peer,
                             struct err *e)
{
    int low = rank < peer ? rank : peer, high = rank < peer ? peer : rank;
    const struct record_field *f = record_fields;
    char low_value[24], high_value[24];
    struct err mine = {0};
    while (record_value(of_rank[low], f) == record_value(of_rank[high], f)) f++;
    record_print(low_value, sizeof low_value, of_rank[low], f);
    record_print(high_value, sizeof high_value, of_rank[high], f);
    err_set(&mine, RC_FATAL, EXIT_LOCKSTEP, "lockstep_failure",
            "LOCKSTEP FAILURE step=%" PRIu64 " field=%s rank%d=%s rank%d=%s", of_rank[rank]->step, f->name, low,
            low_value, high, high_value);
    log_line(LOG_ERROR, "%s", mine.text);
    segment_poison(s, rank, mine.text);
    if (e && e->rc == RC_OK) *e = mine;
    return RC_FATAL;
}

enum rc lockstep_compare(struct segment *s, int rank, const struct lockstep_record *mine, struct err *e)
{
    uint64_t step = mine->step;
    const struct lockstep_record *of_rank[MAX_RANKS] = {0};
    for (int r = 0; r < (int)s->ranks; r++) of_rank[r] = &s->rank[r].record[step & 1];
    s->rank[rank].record[step & 1] = *mine;
    lockstep_publish(s, rank, SEGMENT_RECORD, step);
    for (int peer = 0; peer < (int)s->ranks; peer++) {
        if (peer == rank) continue;
        struct lockstep_wait wait = {.self = rank,
                                     .peer = peer,
                                     .channel = SEGMENT_RECORD,
                                     .value = step,
                                     .bound_us = s->bounds.lockstep_us,
                                     .patience_us = -1,
                                     .what = "record"};
        uint64_t seen;
        enum rc rc = lockstep_wait(s, &wait, &seen, e);
        if (rc != RC_OK) return rc;
        if (seen > step + 1) return fail_out_of_step(s, rank, "record", step, seen, e);
        if (memcmp(of_rank[peer], mine, sizeof *mine) != 0) return fail_lockstep(s, of_rank, rank, peer, e);
    }
    return RC_OK;
}

/* Two boards by parity of the collective's number suffice, for the reason given at the head of comm_shm. */
enum rc lockstep_exchange(struct segment *s, int rank, const void *mine, size_t n_bytes, void *all, struct err *e)
{
    uint64_t number = lockstep_published(s, rank, SEGMENT_COMM) + 1;
    struct err own = {0};
    enum rc rc = lockstep_check(s, e);
    if (rc != RC_OK) return rc;
    if (n_bytes > LOCKSTEP_BOARD_BYTES) {
        err_set(&own, RC_FATAL, EXIT_INTERNAL, "collective_too_large", "an exchange of %zu bytes", n_bytes);
        segment_poison(s, rank, own.text);
        if (e && e->rc == RC_OK) *e = own;
        return RC_FATAL;
    }
    struct segment_board *board = &s->rank[rank].board[number & 1];
    board->n_bytes = n_bytes;
    if (n_bytes) memcpy(board->bytes, mine, n_bytes);
    lockstep_publish(s, rank, SEGMENT_COMM, number);
    for (int peer = 0; peer < (int)s->ranks; peer++) {
        struct lockstep_wait wait = {.self = rank,
                                     .peer = peer,
                                     .channel = SEGMENT_COMM,
                                     .value = number,
                                     .bound_us = s->bounds.collective_us,
                                     .patience_us = -1,
                                     .what = "exchange"};
        uint64_t seen;
        if (peer != rank && (rc = lockstep_wait(s, &wait, &seen, e)) != RC_OK) return rc;
        if (peer != rank && seen > number + 1) return fail_out_of_step(s, rank, "exchange", number, seen, e);
        board = &s->rank[peer].board[number & 1];
        if (board->n_bytes != n_bytes) return fail_out_of_step(s, rank, "exchange size", n_bytes, board->n_bytes, e);
        if (n_bytes) memcpy((unsigned char *)all + (size_t)peer * n_bytes, board->bytes, n_bytes);
    }
    return RC_OK;
}
