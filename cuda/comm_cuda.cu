/* comm_cuda: see comm_cuda.h. Opening: the ranks compare what they were asked for, make and open each wanted path,
 * vote, test it, vote again, race the good ones. Whatever one rank finds wrong with a path, all drop it; whatever
 * breaks a rank itself poisons the group, so that no peer waits for it. */
#include "comm_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <new>

#include "comm_cuda_impl.cuh"

static const char *const path_names[SUM_PATHS] = {"auto", "host", "peer", "nccl", "local"};
static const size_t most_piece_values[SUM_PATHS] = {0, 1 << 20, 1 << 22, 0, 1 << 22};
/* Where ranks may run on one card at the same time, waiting blocks must leave room for those that are awaited. */
enum { CROWDED_BLOCKS = 64 };
static const int64_t lonely_bound_us = 20000000;

const char *sum_path_name(enum sum_path p) { return p >= 0 && p < SUM_PATHS ? path_names[p] : "?"; }

bool sum_path_parse(const char *name, enum sum_path *out)
{
    for (int p = 0; p < SUM_PATHS; p++) {
        if (strcmp(name, path_names[p]) != 0) continue;
        *out = (enum sum_path)p;
        return true;
    }
    return false;
}

static struct comm_cuda *of(const struct comm *c) { return (struct comm_cuda *)c->ctx; }

/* ---- waiting and giving up ---- */

static void call_off(struct comm_cuda *m)
{
    m->notice->abort = 1;
    if (m->nccl) nccl_abort(m->nccl);
}

void comm_cuda_poll(struct comm *c)
{
    struct comm_cuda *m = of(c);
    if (c->ranks == 1 || !m->segment || m->lost.rc != RC_OK) return;
    if (lockstep_watch(m->segment, c->rank, &m->lost) != RC_OK) call_off(m);
}

static enum rc fail_lost(struct comm_cuda *m, struct err *e)
{
    if (e && e->rc == RC_OK) *e = m->lost;
    return RC_FATAL;
}

enum rc comm_cuda_check(struct comm *c, struct err *e)
{
    struct comm_cuda *m = of(c);
    if (m->lost.rc != RC_OK) return fail_lost(m, e);
    const uint32_t lost = m->notice->lost;
    if (!lost) return RC_OK;
    char reason[400];
    if (m->segment && segment_poisoned(m->segment, NULL, reason, sizeof reason))
        err_set(&m->lost, RC_FATAL, EXIT_UNAVAILABLE, "group_poisoned", "the group was stopped: %s", reason);
    else if (lost == MAIL_ABORTED)
        err_set(&m->lost, RC_FATAL, EXIT_UNAVAILABLE, "peer_lost", "rank %d: a sum or gather was called off", c->rank);
    else
        err_set(&m->lost, RC_FATAL, EXIT_UNAVAILABLE, "peer_lost",
                "rank %d: the card of rank %d sent nothing for %.1f s", c->rank, (int)lost - 1,
                (double)m->path[m->words == SUM_NCCL ? m->columns : m->words].mail.bound_ns / 1e9);
    if (m->segment) segment_poison(m->segment, c->rank, m->lost.text);
    return fail_lost(m, e);
}

enum rc comm_cuda_wait(struct comm_cuda *m, struct err *e)
{
    const int64_t bound_us = m->segment ? segment_bounds(m->segment).collective_us : lonely_bound_us;
    const int64_t begun_us = clock_now_us();
    cudaError_t launched = cudaGetLastError(), status;
    while ((status = cudaStreamQuery(m->op.stream)) == cudaErrorNotReady) {
        cudaGetLastError(); /* "not ready" is kept as an error, too */
        comm_cuda_poll(&m->comm);
        if (m->lost.rc == RC_OK && clock_now_us() - begun_us > 2 * bound_us) { /* our kernels have ended by then */
            err_set(&m->lost, RC_FATAL, EXIT_UNAVAILABLE, "peer_lost", "a sum has not ended in %.1f s",
                    (double)bound_us / 5e5);
            call_off(m);
        }
        sleep_us(50);
    }
    if (status == cudaSuccess) status = launched;
    if (status != cudaSuccess)
        return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "cuda", "a sum: %s", cudaGetErrorString(status));
    if (m->lost.rc != RC_OK) return fail_lost(m, e);
    if (!m->notice->lost) return RC_OK;
    return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "peer_lost", "nothing came from rank %d", (int)m->notice->lost - 1);
}

/* ---- operations ---- */

void comm_cuda_sum_on(struct comm_cuda *m, enum sum_path p, const struct sum_job *j)
{
    const struct mail *mail = &m->path[p].mail;
    if (m->comm.ranks == 1)
        sum_alone(&m->op, j);
    else if (p == SUM_NCCL)
        nccl_sum(&m->op, m->nccl, j);
    else if (mail_fits_words(mail, sum_values(j)))
        mail_sum(&m->op, mail, j);
    else
        mail_sum_bulk(&m->op, mail, j);
}

static enum sum_path path_of(const struct comm_cuda *m, size_t values)
{
    return values <= (size_t)m->word_blocks * MAIL_VALUES ? m->words : m->bulk;
}

enum sum_path comm_cuda_path(const struct comm *c, int rows)
{
    return path_of(of(c), (size_t)rows * (size_t)of(c)->width);
}

static enum rc fail_group(struct comm_cuda *m, const char *code, const char *text, struct err *e)
{
    if (m->segment) segment_poison(m->segment, m->comm.rank, text);
    return err_set(e, RC_FATAL, EXIT_INTERNAL, code, "%s", text);
}

static bool job_make(const struct comm_cuda *m, const void *partial, struct kern_split rows, int width, float *residual,
                     struct sum_job *j)
{
    j->partial = (const float *)partial, j->rows = rows, j->width = width, j->residual = residual;
    return rows.decode >= 0 && rows.prefill >= 0 && width > 0 && width % 16 == 0 &&
           sum_values(j) <= (size_t)m->max_rows * (size_t)m->width;
}

static enum rc cuda_all_reduce_add(struct comm *c, const void *partial, struct kern_split rows, int width,
                                   float *residual_dev, struct err *e)
{
    struct comm_cuda *m = of(c);
    struct sum_job j;
    if (m->lost.rc != RC_OK) return fail_lost(m, e);
    if (!job_make(m, partial, rows, width, residual_dev, &j))
        return fail_group(m, "collective_too_large", "a sum of more than the comm was opened for, or of an odd width",
                          e);
    if (sum_values(&j)) comm_cuda_sum_on(m, path_of(m, sum_values(&j)), &j);
    return RC_OK;
}

bool comm_cuda_sum_norm(struct comm *c, const void *partial, struct kern_split rows, int width, float *residual_dev,
                        const float *w_dev, float eps, float *y_dev, void *act)
{
    struct comm_cuda *m = of(c);
    struct sum_job j;
    struct sum_norm n = {};
    if (m->lost.rc != RC_OK || !m->fused || m->words == SUM_NCCL) return false;
    const struct mail *mail = &m->path[m->words].mail;
    if (!job_make(m, partial, rows, width, residual_dev, &j) || !sum_values(&j) || !mail_sum_norm_takes(mail, &j))
        return false;
    n.w = w_dev, n.eps = eps, n.y = y_dev, n.act = act;
    mail_sum_norm(&m->op, mail, &j, &n);
    return true;
}

static bool cuda_all_reduce_add_norm(struct comm *c, const void *partial, struct kern_split rows, int width, float *residual_dev,
                                     const float *norm_dev, float eps, void *y_act)
{
    return comm_cuda_sum_norm(c, partial, rows, width, residual_dev, norm_dev, eps, NULL, y_act);
}

static enum rc cuda_all_gather_columns(struct comm *c, const float *mine_dev, int rows,
                                       const struct range *range_of_rank, int row_width, float *out, struct err *e)
{
    struct comm_cuda *m = of(c);
    const size_t pitch = (size_t)row_width * sizeof(float);
    if (m->lost.rc != RC_OK) return fail_lost(m, e);
    bool good = rows >= 0;
    for (int r = 0; r < c->ranks && good; r++) {
        const struct range g = range_of_rank[r];
        good = g.first >= 0 && g.count >= 0 && g.first <= row_width && g.count <= row_width - g.first &&
               (size_t)rows * (size_t)g.count <= m->max_gather_floats;
    }
    if (!good || (!mine_dev && rows && range_of_rank[c->rank].count))
        return fail_group(m, "bad_gather",
                          "a gather has columns outside of its rows, or more than the comm was opened for", e);
    if (!rows) return RC_OK;
    if (c->ranks > 1) {
        mail_gather(&m->op, &m->path[m->columns].mail, mine_dev, rows, range_of_rank, row_width, out);
    } else if (range_of_rank[0].count) {
        const size_t n_bytes = (size_t)range_of_rank[0].count * sizeof(float);
        cudaMemcpy2DAsync(out + range_of_rank[0].first, pitch, mine_dev, n_bytes, n_bytes, (size_t)rows,
                          cudaMemcpyDefault, m->op.stream);
    }
    return RC_OK;
}

static enum rc cuda_barrier(struct comm *c, struct err *e)
{
    struct comm_cuda *m = of(c);
    return c->ranks == 1 || !m->segment ? RC_OK : lockstep_exchange(m->segment, c->rank, NULL, 0, NULL, e);
}

static void cuda_abort(struct comm *c, const char *reason)
{
    struct comm_cuda *m = of(c);
    if (m->segment) segment_poison(m->segment, c->rank, reason);
    call_off(m);
}

static void cuda_close(struct comm *c)
{
    struct comm_cuda *m = of(c);
    nccl_close(m->nccl);
    for (int p = 0; p < SUM_PATHS; p++) {
        inbox_close(&m->path[p].inbox);
        cudaFree(m->path[p].state);
    }
    cudaFreeHost(m->notice);
    delete m;
}

/* ---- opening ---- */

/* What all ranks must have been asked alike, and what each card can. */
struct hello {
    int max_rows, width, path;
    uint64_t max_gather_floats;
    int word_blocks, sm;
};

static enum rc agree(struct comm_cuda *m, enum sum_path path, struct err *e)
{
    struct hello mine = {}, of_rank[MAX_RANKS];
    mine.max_rows = m->max_rows, mine.width = m->width, mine.path = path, mine.max_gather_floats = m->max_gather_floats;
    mine.word_blocks = m->word_blocks, mine.sm = m->op.sm;
    enum rc rc = lockstep_exchange(m->segment, m->comm.rank, &mine, sizeof mine, of_rank, e);
    if (rc != RC_OK) return rc;
    for (int r = 0; r < m->comm.ranks; r++) {
        const struct hello *h = &of_rank[r];
        if (h->max_rows != m->max_rows || h->width != m->width || h->path != (int)path ||
            h->max_gather_floats != m->max_gather_floats)
            return fail_group(m, "collective_mismatch", "ranks were asked for different sums, gathers or paths", e);
        if (h->word_blocks < m->word_blocks) m->word_blocks = h->word_blocks;
        if (h->sm < 90) m->fused = false;
    }
    if (m->crowded && m->word_blocks > CROWDED_BLOCKS) m->word_blocks = CROWDED_BLOCKS;
    return RC_OK;
}

static bool path_state(struct comm_cuda *m, enum sum_path p, const struct mail_layout *layout, int64_t bound_us)
{
    struct mail_path *path = &m->path[p];
    cudaError_t status = cudaMalloc((void **)&path->state, sizeof *path->state);
    if (status == cudaSuccess) status = cudaMemset(path->state, 0, sizeof *path->state);
    if (status == cudaSuccess) status = cudaDeviceSynchronize();
    path->mail.rank = m->comm.rank, path->mail.ranks = m->comm.ranks, path->mail.at = *layout;
    path->mail.state = path->state, path->mail.notice = m->notice_dev;
    path->mail.bound_ns = (uint64_t)bound_us * 1000, path->mail.word_blocks = m->word_blocks;
    path->mail.bulk_blocks = m->crowded ? (int)CROWDED_BLOCKS : (int)BULK_BLOCKS;
    if (status != cudaSuccess)
        snprintf(m->why_not[p], INBOX_WHY_BYTES, "device memory: %s", cudaGetErrorString(status));
    return status == cudaSuccess;
}

/* Collective: makes, opens and tests a mailbox path. Usable on all ranks or on none. */
static enum rc open_path(struct comm_cuda *m, enum sum_path p, struct err *e)
{
    struct mail_path *path = &m->path[p];
    struct inbox_card card = {}, card_of_rank[MAX_RANKS];
    char *why = m->why_not[p];
    const struct mail_layout layout =
        mail_layout_make((size_t)m->max_rows * (size_t)m->width, most_piece_values[p], m->max_gather_floats);
    bool ok = path_state(m, p, &layout, segment_bounds(m->segment).collective_us) &&
              inbox_make(&path->inbox, p, m->comm.rank, m->comm.ranks, layout.area_bytes, &card, why);
    segment_beat(m->segment, m->comm.rank);
    enum rc rc = comm_vote(m->segment, m->comm.rank, m->comm.ranks, ok, why, &ok, why, e);
    if (rc == RC_OK && ok) rc = lockstep_exchange(m->segment, m->comm.rank, &card, sizeof card, card_of_rank, e);
    if (rc == RC_OK && ok) {
        ok = inbox_open(&path->inbox, card_of_rank, why);
        segment_beat(m->segment, m->comm.rank);
        rc = comm_vote(m->segment, m->comm.rank, m->comm.ranks, ok, why, &ok, why, e);
    }
    inbox_shared(&path->inbox);
    if (rc == RC_OK && ok) {
        inbox_mail(&path->inbox, &path->mail);
        rc = trial_check(m, p, &ok, why, e);
    }
    path->usable = rc == RC_OK && ok;
    return rc;
}

static enum rc open_nccl(struct comm_cuda *m, struct err *e)
{
    char *why = m->why_not[SUM_NCCL];
    bool ok = false;
    if (m->crowded) {
        snprintf(why, INBOX_WHY_BYTES, "ranks share a card");
        return RC_OK;
    }
    enum rc rc =
        nccl_open(m->segment, m->comm.rank, m->comm.ranks, (size_t)m->max_rows * (size_t)m->width, &m->nccl, why, e);
    if (rc != RC_OK || !m->nccl) return rc;
    rc = trial_check(m, SUM_NCCL, &ok, why, e);
    if (rc == RC_OK && ok) return RC_OK;
    nccl_close(m->nccl);
    m->nccl = NULL;
    return rc;
}

static enum rc fail_path(struct comm_cuda *m, enum sum_path p, struct err *e)
{
    return err_set(e, RC_BAD_INPUT, EXIT_CONFIG, "sum_path_unavailable",
                   "sums by the path \"%s\" are not possible here: %s", sum_path_name(p), m->why_not[p]);
}

/* Collective: m->words, bulk and columns, from what is usable. */
static enum rc choose(struct comm_cuda *m, enum sum_path wanted, struct err *e)
{
    char line[TRIAL_LINE_BYTES] = "";
    const bool host = m->path[SUM_HOST].usable, peer = m->path[SUM_PEER].usable;
    enum rc rc = RC_OK;
    if (wanted == SUM_NCCL && !m->nccl) return fail_path(m, wanted, e);
    if ((wanted == SUM_HOST || wanted == SUM_PEER) && !m->path[wanted].usable) return fail_path(m, wanted, e);
    if (!host && !peer)
        return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "no_sum_path",
                       "ranks cannot exchange anything: host: %s; peer: %s", m->why_not[SUM_HOST],
                       m->why_not[SUM_PEER]);
    m->words = m->bulk = wanted != SUM_AUTO ? wanted : peer ? SUM_PEER : SUM_HOST;
    if (wanted == SUM_AUTO && !m->crowded)
        rc = trial_race(m, line, e);
    else
        snprintf(line, sizeof line, "; not raced, %s", wanted == SUM_AUTO ? "ranks share a card" : "as asked for");
    m->columns = m->words != SUM_NCCL ? m->words : peer ? SUM_PEER : SUM_HOST;
    if (rc == RC_OK && m->comm.rank == 0)
        log_line(LOG_INFO, "sums: %s, large ones %s%s", sum_path_name(m->words), sum_path_name(m->bulk), line);
    return rc;
}

static enum rc open_group(struct comm_cuda *m, const struct comm_cuda_options *o, struct err *e)
{
    const enum sum_path wanted = o->path;
    for (int r = 0; r < o->ranks; r++)
        for (int other = 0; other < r; other++)
            if (o->device_of_rank[r] == o->device_of_rank[other]) m->crowded = true;
    enum rc rc = agree(m, wanted, e);
    if (rc == RC_OK && wanted != SUM_HOST) rc = open_path(m, SUM_PEER, e);
    if (rc == RC_OK && wanted != SUM_PEER) rc = open_path(m, SUM_HOST, e);
    /* It is for sums that do not fit words, unless it is asked for. */
    const bool large = (size_t)m->max_rows * (size_t)m->width > (size_t)m->word_blocks * MAIL_VALUES;
    if (rc == RC_OK && (wanted == SUM_NCCL || (wanted == SUM_AUTO && large))) rc = open_nccl(m, e);
    if (rc == RC_OK) rc = choose(m, wanted, e);
    if (rc == RC_OK && m->words != SUM_HOST && m->bulk != SUM_HOST && m->columns != SUM_HOST) {
        m->path[SUM_HOST].usable = false;
        inbox_close(&m->path[SUM_HOST].inbox);
    }
    return rc;
}

/* No peers, or only pretended ones. */
static enum rc open_alone(struct comm_cuda *m, struct err *e)
{
    struct mail_path *path = &m->path[SUM_LOCAL];
    struct inbox_card card;
    const struct mail_layout layout =
        mail_layout_make((size_t)m->max_rows * (size_t)m->width, most_piece_values[SUM_LOCAL], m->max_gather_floats);
    const int64_t bound_us = m->segment ? segment_bounds(m->segment).collective_us : lonely_bound_us;
    m->words = m->bulk = m->columns = SUM_LOCAL;
    if (m->comm.ranks > 1) m->segment = NULL; /* nobody else is there to be watched */
    bool ok = path_state(m, SUM_LOCAL, &layout, bound_us);
    if (ok && m->comm.ranks > 1) {
        ok = inbox_make(&path->inbox, SUM_LOCAL, m->comm.rank, m->comm.ranks, layout.area_bytes, &card,
                        m->why_not[SUM_LOCAL]);
        if (ok) inbox_mail(&path->inbox, &path->mail);
    }
    path->usable = ok;
    return ok ? RC_OK : err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "no_sum_path", "sums: %s", m->why_not[SUM_LOCAL]);
}

static enum rc prepare(struct comm_cuda *m, struct err *e)
{
    enum rc rc = mail_preload(e);
    if (rc != RC_OK) return rc;
    cudaError_t status =
        cudaHostAlloc((void **)&m->notice, sizeof *m->notice, cudaHostAllocMapped | cudaHostAllocPortable);
    if (status == cudaSuccess) status = cudaHostGetDevicePointer((void **)&m->notice_dev, m->notice, 0);
    if (status != cudaSuccess)
        return err_set(e, RC_FATAL, EXIT_UNAVAILABLE, "cuda", "pinned memory: %s", cudaGetErrorString(status));
    memset((void *)m->notice, 0, sizeof *m->notice);
    m->word_blocks = mail_word_blocks(&m->op);
    m->fused = m->op.sm >= 90;
    return RC_OK;
}

enum rc comm_cuda_open(const struct op_context *c, const struct comm_cuda_options *o, struct comm **out, struct err *e)
{
    const bool group = o->ranks > 1 && o->path != SUM_LOCAL;
    *out = NULL;
    if (o->ranks < 1 || o->ranks > MAX_RANKS || o->rank < 0 || o->rank >= o->ranks || o->max_rows < 1 ||
        o->width < 16 || o->width % 16 || (group && (!o->segment || !o->device_of_rank)))
        return err_set(e, RC_FATAL, EXIT_INTERNAL, "bad_comm", "rank %d of %d, sums of %d x %d", o->rank, o->ranks,
                       o->max_rows, o->width);
    struct comm_cuda *m = new (std::nothrow) comm_cuda();
    if (!m) return err_no_memory(e);
    m->comm.rank = o->rank, m->comm.ranks = o->ranks, m->comm.ctx = m;
    m->comm.all_reduce_add = cuda_all_reduce_add, m->comm.all_reduce_add_norm = cuda_all_reduce_add_norm, m->comm.all_gather_columns = cuda_all_gather_columns;
    m->comm.barrier = cuda_barrier, m->comm.abort = cuda_abort, m->comm.close = cuda_close;
    m->op = *c, m->segment = o->segment;
    m->max_rows = o->max_rows, m->width = o->width, m->max_gather_floats = o->max_gather_floats;
    for (int p = 0; p < SUM_PATHS; p++) m->path[p].inbox.memfd = -1;
    struct err mine = {};
    enum rc rc = prepare(m, &mine);
    if (rc == RC_OK) rc = group ? open_group(m, o, &mine) : open_alone(m, &mine);
    if (rc == RC_OK) {
        *out = &m->comm;
        return RC_OK;
    }
    if (group && rc == RC_FATAL) segment_poison(m->segment, o->rank, mine.text);
    cuda_close(&m->comm);
    if (e && e->rc == RC_OK) *e = mine;
    return rc;
}
