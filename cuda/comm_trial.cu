/* comm_trial: whether a path of sums can be trusted on these cards, and which is fastest.
 *
 * The check uses sums that FP32 rounds, so that a wrong order of ranks shows, and values that depend on rank, plane,
 * place and round, so that a wrong place or a slot of an earlier round shows. Every rank's verdict counts. The race
 * runs captured graphs, as the engine will. Nothing here launches a kernel that waits for peers before all ranks have
 * said that they are ready. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "comm_cuda_impl.cuh"

enum {
    CHECK_ROUNDS = 4,
    RACE_ROWS = 4,
    RACE_REPLAYS = 7,
    RACE_SMALL_SUMS = 64,
    RACE_LARGE_SUMS = 4,
    RACE_MOST_ROWS = 2048
};
static const uint64_t check_bound_ns = UINT64_C(5000000000);

/* In [-2, 2), 24 significant bits. */
static float noise(uint64_t x)
{
    x ^= x >> 31, x *= UINT64_C(0x7fb5d329728ea185);
    x ^= x >> 27, x *= UINT64_C(0x81dadef4bc2dd44d);
    x ^= x >> 33;
    return (float)(int32_t)(x & 0xffffff) * 0x1p-22f - 2.0f;
}

/* rank -1: the residual. */
static float value_of(int rank, int round, int plane, size_t i)
{
    return noise(((uint64_t)(rank + 2) << 56) + ((uint64_t)round << 48) + ((uint64_t)plane << 40) + i + 1);
}

static float rounded(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    u = (u + 0x7fff + (u >> 16 & 1)) & 0xffff0000u;
    memcpy(&f, &u, sizeof f);
    return f;
}

/* Which rank has no partial in a round, or -1. */
static int silent_rank(const struct comm_cuda *m, int round) { return round == 3 ? round % m->comm.ranks : -1; }

static float expected(const struct comm_cuda *m, int round, size_t decode, size_t i)
{
    float sum = 0;
    for (int r = 0; r < m->comm.ranks; r++) {
        float part = value_of(r, round, 0, i);
        if (i < decode) part += value_of(r, round, 1, i);
        part = r == silent_rank(m, round) ? 0.0f : rounded(part);
        sum = r ? sum + part : part;
    }
    return value_of(-1, round, 0, i) + sum;
}

struct trial_memory {
    float *partial, *residual;
    std::vector<float> host;
};

static bool memory_make(struct trial_memory *t, int rows, int width)
{
    const size_t values = (size_t)rows * (size_t)width;
    return cudaMalloc((void **)&t->partial, comm_partial_bytes(rows, width)) == cudaSuccess &&
           cudaMalloc((void **)&t->residual, values * sizeof(float)) == cudaSuccess &&
           cudaMemset(t->partial, 0, comm_partial_bytes(rows, width)) == cudaSuccess &&
           cudaMemset(t->residual, 0, values * sizeof(float)) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}

static void memory_free(struct trial_memory *t)
{
    cudaFree(t->partial);
    cudaFree(t->residual);
}

/* In the order of our stream: a plain copy from pageable memory may still be under way when it returns. */
static bool to_device(struct comm_cuda *m, float *dev, const float *host, size_t floats)
{
    return cudaMemcpyAsync(dev, host, floats * sizeof(float), cudaMemcpyHostToDevice, m->op.stream) == cudaSuccess &&
           cudaStreamSynchronize(m->op.stream) == cudaSuccess;
}

/* One sum; false: why. */
static bool check_sum(struct comm_cuda *m, enum sum_path p, struct trial_memory *t, int rows, int round, char *why)
{
    struct sum_job j = {};
    struct err e = {};
    j.rows.decode = round == 0 ? rows : round == 1 ? 0 : rows / 2;
    j.rows.prefill = rows - j.rows.decode;
    j.width = m->width, j.residual = t->residual;
    j.partial = m->comm.rank == silent_rank(m, round) ? NULL : t->partial;
    const size_t values = sum_values(&j), decode = (size_t)j.rows.decode * (size_t)m->width;
    for (size_t i = 0; i < values; i++) {
        t->host[i < decode ? i : i + decode] = value_of(m->comm.rank, round, 0, i);
        if (i < decode) t->host[decode + i] = value_of(m->comm.rank, round, 1, i);
    }
    bool ok = to_device(m, t->partial, t->host.data(), values + decode);
    for (size_t i = 0; i < values; i++) t->host[i] = value_of(-1, round, 0, i);
    ok = to_device(m, t->residual, t->host.data(), values) && ok;
    comm_cuda_sum_on(m, p, &j); /* also when something failed here: the peers wait */
    if (comm_cuda_wait(m, &e) != RC_OK) {
        snprintf(why, INBOX_WHY_BYTES, "%.*s", INBOX_WHY_BYTES - 1, e.text);
        return false;
    }
    ok = ok && cudaMemcpy(t->host.data(), t->residual, values * sizeof(float), cudaMemcpyDeviceToHost) == cudaSuccess;
    if (!ok)
        snprintf(why, INBOX_WHY_BYTES, "a copy failed in its self-test: %s", cudaGetErrorString(cudaGetLastError()));
    for (size_t i = 0; i < values && ok; i++) {
        const float should = expected(m, round, decode, i);
        ok = memcmp(&should, &t->host[i], sizeof should) == 0;
        if (!ok)
            snprintf(why, INBOX_WHY_BYTES, "wrong in its self-test: %d rows, round %d, place %zu: %a instead of %a",
                     rows, round, i, (double)t->host[i], (double)should);
    }
    return ok;
}

enum rc trial_check(struct comm_cuda *m, enum sum_path p, bool *ok, char *why, struct err *e)
{
    const int beyond_words = m->word_blocks * MAIL_VALUES / m->width + 9;
    const int sizes[] = {1, 3, 8, beyond_words};
    const int most = std::min(m->max_rows, beyond_words);
    struct trial_memory t = {};
    struct mail *mail = &m->path[p].mail;
    const uint64_t bound_ns = mail->bound_ns;
    why[0] = 0;
    bool mine = memory_make(&t, most, m->width);
    if (!mine) snprintf(why, INBOX_WHY_BYTES, "no memory for its self-test");
    t.host.resize((size_t)most * (size_t)m->width * 2);
    enum rc rc = comm_vote(m->segment, m->comm.rank, m->comm.ranks, mine, why, ok, why, e);
    if (rc == RC_OK && *ok) {
        mail->bound_ns = std::min(bound_ns, check_bound_ns);
        for (size_t s = 0; s < sizeof sizes / sizeof sizes[0] && mine; s++)
            for (int round = 0; round < CHECK_ROUNDS && mine && sizes[s] <= m->max_rows; round++)
                mine = check_sum(m, p, &t, sizes[s], round, why);
        mail->bound_ns = bound_ns;
        rc = comm_vote(m->segment, m->comm.rank, m->comm.ranks, mine, why, ok, why, e);
        if (m->lost.rc == RC_OK) m->notice->lost = 0; /* of this path, which is given up */
    }
    memory_free(&t);
    return rc;
}

/* ---- race ---- */

struct race {
    int rows[RACE_ROWS];
    float us[SUM_PATHS][RACE_ROWS]; /* 0: not run */
};

static bool capture(struct comm_cuda *m, enum sum_path p, const struct sum_job *j, int sums, cudaGraphExec_t *out)
{
    cudaGraph_t graph = NULL;
    if (cudaStreamBeginCapture(m->op.stream, cudaStreamCaptureModeThreadLocal) != cudaSuccess) return false;
    for (int i = 0; i < sums; i++) comm_cuda_sum_on(m, p, j);
    bool ok =
        cudaStreamEndCapture(m->op.stream, &graph) == cudaSuccess && cudaGraphInstantiate(out, graph, 0) == cudaSuccess;
    if (graph) cudaGraphDestroy(graph);
    return ok;
}

/* Microseconds of a sum, the median of some replays. Collective, whatever fails here: -1 then. */
static enum rc time_path(struct comm_cuda *m, enum sum_path p, struct trial_memory *t, int rows, int sums, float *us,
                         struct err *e)
{
    struct sum_job j = {};
    cudaGraphExec_t graph = NULL;
    cudaEvent_t begin = NULL, end = NULL;
    std::vector<float> times;
    enum rc rc = RC_OK;
    bool ready = false;
    char why[INBOX_WHY_BYTES] = "";
    j.rows.decode = std::min(rows, 8), j.rows.prefill = rows - j.rows.decode;
    j.width = m->width, j.partial = t->partial, j.residual = t->residual;
    bool ok = cudaEventCreate(&begin) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess &&
              capture(m, p, &j, sums, &graph) && cudaGraphUpload(graph, m->op.stream) == cudaSuccess &&
              cudaStreamSynchronize(m->op.stream) == cudaSuccess;
    rc = comm_vote(m->segment, m->comm.rank, m->comm.ranks, ok, why, &ready, why, e);
    for (int i = 0; i < RACE_REPLAYS && rc == RC_OK && ready; i++) {
        rc = lockstep_exchange(m->segment, m->comm.rank, NULL, 0, NULL, e);
        if (rc != RC_OK) break;
        cudaEventRecord(begin, m->op.stream);
        cudaGraphLaunch(graph, m->op.stream);
        cudaEventRecord(end, m->op.stream);
        float ms = 0;
        if (comm_cuda_wait(m, NULL) != RC_OK || cudaEventElapsedTime(&ms, begin, end) != cudaSuccess) ok = false;
        times.push_back(ms * 1e3f / (float)sums);
    }
    if (times.size() && ok) std::nth_element(times.begin(), times.begin() + (long)times.size() / 2, times.end());
    *us = times.size() && ok ? times[times.size() / 2] : -1;
    if (graph) cudaGraphExecDestroy(graph);
    if (begin) cudaEventDestroy(begin);
    if (end) cudaEventDestroy(end);
    cudaGetLastError();
    return rc;
}

static bool runs(const struct comm_cuda *m, enum sum_path p)
{
    return p == SUM_NCCL ? m->nccl != NULL : (p == SUM_HOST || p == SUM_PEER) && m->path[p].usable;
}

/* The path with the least time over columns first .. last, of those that ran everywhere. */
static enum sum_path fastest(const struct race of_rank[], int ranks, int first, int last, bool nccl,
                             enum sum_path otherwise)
{
    enum sum_path best = otherwise;
    float least = INFINITY;
    for (int p = SUM_HOST; p <= (nccl ? SUM_NCCL : SUM_PEER); p++) {
        float sum = 0;
        for (int r = 0; r < ranks; r++)
            for (int i = first; i <= last; i++) sum += of_rank[r].us[p][i] > 0 ? of_rank[r].us[p][i] : INFINITY;
        if (sum < least) least = sum, best = (enum sum_path)p;
    }
    return best;
}

static void describe(const struct race *race, char *line)
{
    size_t at = 0;
    line[0] = 0;
    for (int p = SUM_HOST; p <= SUM_NCCL; p++) {
        for (int i = 0; i < RACE_ROWS && at < TRIAL_LINE_BYTES; i++) {
            if (race->us[p][i] == 0) continue;
            at += (size_t)snprintf(line + at, TRIAL_LINE_BYTES - at, "; %s %d rows %.1f us",
                                   sum_path_name((enum sum_path)p), race->rows[i], (double)race->us[p][i]);
        }
    }
}

enum rc trial_race(struct comm_cuda *m, char *line, struct err *e)
{
    struct race mine = {}, of_rank[MAX_RANKS] = {};
    const int rows[RACE_ROWS] = {1, 4, 8, RACE_MOST_ROWS};
    struct trial_memory t = {};
    bool ready = false;
    char why[INBOX_WHY_BYTES] = "no memory";
    const enum sum_path safe = m->path[SUM_PEER].usable ? SUM_PEER : SUM_HOST;
    const int most = std::min(m->max_rows, (int)RACE_MOST_ROWS);
    const bool large = !mail_fits_words(&m->path[safe].mail, (size_t)most * (size_t)m->width);
    enum rc rc =
        comm_vote(m->segment, m->comm.rank, m->comm.ranks, memory_make(&t, most, m->width), why, &ready, why, e);
    for (int i = 0; i < RACE_ROWS; i++) mine.rows[i] = std::min(rows[i], most);
    for (int p = SUM_HOST; p <= SUM_NCCL && rc == RC_OK && ready; p++) {
        for (int i = 0; i < RACE_ROWS && rc == RC_OK; i++) {
            const bool is_large = i == RACE_ROWS - 1;
            if (!runs(m, (enum sum_path)p) || (is_large && !large) || (p == SUM_NCCL && !is_large)) continue;
            rc = time_path(m, (enum sum_path)p, &t, mine.rows[i], is_large ? RACE_LARGE_SUMS : RACE_SMALL_SUMS,
                           &mine.us[p][i], e);
        }
    }
    memory_free(&t);
    if (rc == RC_OK) rc = lockstep_exchange(m->segment, m->comm.rank, &mine, sizeof mine, of_rank, e);
    if (rc != RC_OK) return rc;
    enum sum_path choice[2] = {fastest(of_rank, m->comm.ranks, 0, RACE_ROWS - 2, false, safe),
                               large ? fastest(of_rank, m->comm.ranks, RACE_ROWS - 1, RACE_ROWS - 1, true, safe)
                                     : safe};
    enum sum_path of_all[MAX_RANKS][2];
    rc = lockstep_exchange(m->segment, m->comm.rank, choice, sizeof choice, of_all, e);
    m->words = of_all[0][0];
    m->bulk = large ? of_all[0][1] : m->words;
    describe(&mine, line);
    return rc;
}
