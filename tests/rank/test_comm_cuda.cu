/* Sums and gathers of CUDA ranks: every path against the host, bit by bit, eager and in replayed graphs; peers that
 * die, fall silent or stop the group. Ranks are processes, two or three on one card (where each sum takes a time
 * slice), and one a card where there are two. "bench": microseconds of a sum.
 *
 * This process makes no CUDA call, since its children must: they report by their exit status and on stderr. */
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "act.cuh"
#include "comm_cuda.h"
#include "cuda_fixture.cuh"
#include "row_norm.cuh"

enum { CHILD_SECONDS = 30, MOST_CARDS = 8 };

struct plan {
    int ranks, devices[MAX_RANKS];
    enum sum_path path;
    int width, max_rows;
    bool quick; /* few sizes */
    bool bench;
};

struct child {
    struct plan plan;
    struct segment *segment;
    int rank, wrong;
    struct op_context op;
    struct comm *comm;
};

static int n_cards;

static void report(struct child *c, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void report(struct child *c, const char *format, ...)
{
    char line[600];
    va_list a;
    va_start(a, format);
    vsnprintf(line, sizeof line, format, a);
    va_end(a);
    if (c->segment) segment_poison(c->segment, c->rank, "a check failed"); /* the others need not wait */
    if (c->wrong++ < 20)
        fprintf(stderr, "rank %d of %d, %s, width %d: %s\n", c->rank, c->plan.ranks, sum_path_name(c->plan.path),
                c->plan.width, line);
}

#define CUDA(call)                                                                                                     \
    do {                                                                                                               \
        cudaError_t status_ = (call);                                                                                  \
        if (status_ != cudaSuccess) {                                                                                  \
            fprintf(stderr, "line %d: %s: %s\n", __LINE__, #call, cudaGetErrorString(status_));                        \
            _exit(3);                                                                                                  \
        }                                                                                                              \
    } while (0)

/* ---- ranks as processes ---- */

static struct segment *segment_new(int ranks, int64_t bound_us, void **memory)
{
    const size_t n_bytes = (segment_bytes(ranks, 4096) + 4095) / 4096 * 4096;
    struct lockstep_bounds b = {bound_us, 2 * bound_us, 4 * bound_us};
    *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (*memory == MAP_FAILED) exit(1);
    segment_init(*memory, ranks, 4096, &b);
    return segment_attach(*memory, segment_bytes(ranks, 4096), ranks, NULL);
}

static void child_main(struct child *c, void (*body)(struct child *))
{
    char name[16];
    alarm(CHILD_SECONDS);
    snprintf(name, sizeof name, "rank %d: ", c->rank);
    log_set(LOG_INFO, name);
    CUDA(cudaSetDevice(c->plan.devices[c->rank]));
    c->op = open_card();
    body(c);
    _exit(c->wrong ? 1 : 0);
}

/* Runs body on all ranks; true: all ended well. */
static bool run_ranks(const struct plan *p, int64_t bound_us, void (*body)(struct child *))
{
    void *memory;
    struct segment *segment = segment_new(p->ranks, bound_us, &memory);
    pid_t pid[MAX_RANKS];
    bool good = true;
    fflush(NULL);
    for (int r = 0; r < p->ranks; r++) {
        pid[r] = fork();
        if (pid[r]) continue;
        struct child c = {};
        c.plan = *p, c.segment = segment, c.rank = r;
        child_main(&c, body);
    }
    for (int r = 0; r < p->ranks; r++) {
        int status = 0;
        waitpid(pid[r], &status, 0);
        if (WIFEXITED(status) && WEXITSTATUS(status) == 0) continue;
        fprintf(stderr, "rank %d ended with status 0x%x\n", r, (unsigned)status);
        good = false;
    }
    munmap(memory, segment_bytes(p->ranks, 4096));
    return good;
}

static enum rc comm_new(struct child *c, struct err *e)
{
    struct comm_cuda_options o = {};
    o.segment = c->segment, o.rank = c->rank, o.ranks = c->plan.ranks, o.device_of_rank = c->plan.devices;
    o.path = c->plan.path, o.max_rows = c->plan.max_rows, o.width = c->plan.width;
    o.max_gather_floats = c->plan.bench ? 4 * 248320 : 8 * 5000;
    return comm_cuda_open(&c->op, &o, &c->comm, e);
}

static bool comm_start(struct child *c)
{
    struct err e = {};
    if (comm_new(c, &e) == RC_OK) return true;
    report(c, "open: %s: %s", e.code, e.text);
    return false;
}

/* As the backend's finish does. */
static enum rc wait_for_it(struct child *c, struct err *e)
{
    while (cudaStreamQuery(c->op.stream) == cudaErrorNotReady) {
        comm_cuda_poll(c->comm);
        sleep_us(100);
    }
    cudaGetLastError();
    CUDA(cudaStreamSynchronize(c->op.stream));
    return comm_cuda_check(c->comm, e);
}

/* ---- sums ---- */

static float noise(uint64_t x)
{
    x ^= x >> 30, x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27, x *= UINT64_C(0x94d049bb133111eb);
    x ^= x >> 31;
    return (float)((int32_t)(x & 0xffffff) - 0x800000) * 0x1p-21f;
}
static float partial_value(int rank, int seed, size_t i)
{
    return noise(((uint64_t)rank << 50) + ((uint64_t)seed << 40) + i);
}
static float residual_value(int seed, size_t i) { return noise((UINT64_C(77) << 50) + ((uint64_t)seed << 40) + i); }

/* What rank r adds to value i of rows; a local path has the other ranks send what this one does. */
static float sum_of(const struct child *c, struct kern_split rows, int seed, int silent, size_t i)
{
    const size_t decode = (size_t)rows.decode * (size_t)c->plan.width;
    float sum = 0;
    for (int r = 0; r < c->plan.ranks; r++) {
        const int from = c->plan.path == SUM_LOCAL ? c->rank : r;
        float v = i < decode ? partial_value(from, seed, i) + partial_value(from, seed, decode + i)
                             : partial_value(from, seed, decode + i);
        v = from == silent ? 0.0f : bf16_round(v);
        sum = r ? sum + v : v;
    }
    return sum;
}

enum { GUARD_FLOATS = 64 };

struct memory {
    float *partial, *residual_whole, *residual;
    std::vector<float> host;
};

static struct memory memory_new(size_t values)
{
    struct memory m = {};
    CUDA(cudaMalloc((void **)&m.partial, 2 * values * sizeof(float)));
    CUDA(cudaMalloc((void **)&m.residual_whole, (values + 2 * GUARD_FLOATS) * sizeof(float)));
    m.residual = m.residual_whole + GUARD_FLOATS;
    m.host.resize(2 * values);
    return m;
}

static void memory_free(struct memory *m)
{
    CUDA(cudaFree(m->partial));
    CUDA(cudaFree(m->residual_whole));
}

/* Fills both; what lies after the partial is NaN, the residual lies between guards. */
static void fill(struct child *c, struct memory *m, struct kern_split rows, int seed)
{
    const size_t values = (size_t)kern_rows(rows) * (size_t)c->plan.width,
                 decode = (size_t)rows.decode * (size_t)c->plan.width;
    CUDA(cudaMemset(m->partial, 0xff, m->host.size() * sizeof(float)));
    for (size_t i = 0; i < values + decode; i++) m->host[i] = partial_value(c->rank, seed, i);
    CUDA(cudaMemcpy(m->partial, m->host.data(), (values + decode) * sizeof(float), cudaMemcpyHostToDevice));
    CUDA(cudaMemset(m->residual_whole, 0xa5, (values + 2 * GUARD_FLOATS) * sizeof(float)));
    for (size_t i = 0; i < values; i++) m->host[i] = residual_value(seed, i);
    CUDA(cudaMemcpy(m->residual, m->host.data(), values * sizeof(float), cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize());
    /* Ranks that are threads share a device: a call that waits for all of it must not wait for a kernel that waits
     * for us. */
    c->comm->barrier(c->comm, NULL);
}

static void compare(struct child *c, struct memory *m, struct kern_split rows, int seed, int silent, int times,
                    const char *what)
{
    const size_t values = (size_t)kern_rows(rows) * (size_t)c->plan.width;
    std::vector<uint32_t> guards(2 * GUARD_FLOATS);
    CUDA(cudaMemcpy(m->host.data(), m->residual, values * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < values; i++) {
        float should = residual_value(seed, i);
        const float sum = sum_of(c, rows, seed, silent, i);
        for (int k = 0; k < times; k++) should += sum;
        if (memcmp(&should, &m->host[i], sizeof should) == 0) continue;
        report(c, "%s, rows %d + %d, place %zu: %a, expected %a", what, rows.decode, rows.prefill, i,
               (double)m->host[i], (double)should);
        break;
    }
    CUDA(cudaMemcpy(guards.data(), m->residual_whole, GUARD_FLOATS * 4, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(guards.data() + GUARD_FLOATS, m->residual + values, GUARD_FLOATS * 4, cudaMemcpyDeviceToHost));
    for (uint32_t g : guards)
        if (g != 0xa5a5a5a5u) {
            report(c, "%s, rows %d + %d: a guard was overwritten", what, rows.decode, rows.prefill);
            break;
        }
}

static void check_sum(struct child *c, struct memory *m, struct kern_split rows, int silent)
{
    const int seed = kern_rows(rows);
    struct err e = {};
    fill(c, m, rows, seed);
    enum rc rc =
        c->comm->all_reduce_add(c->comm, c->rank == silent ? NULL : m->partial, rows, c->plan.width, m->residual, &e);
    if (rc == RC_OK) rc = wait_for_it(c, &e);
    if (rc != RC_OK) report(c, "sum of %d rows: %s: %s", kern_rows(rows), e.code, e.text);
    compare(c, m, rows, seed, silent, 1, "eager");
}

static cudaGraphExec_t captured(struct child *c, const struct memory *m, struct kern_split rows, int sums)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    CUDA(cudaStreamBeginCapture(c->op.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < sums; i++) c->comm->all_reduce_add(c->comm, m->partial, rows, c->plan.width, m->residual, NULL);
    CUDA(cudaStreamEndCapture(c->op.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

static void check_graph(struct child *c, struct memory *m, struct kern_split rows)
{
    const int seed = 3000 + kern_rows(rows), sums = 3, replays = 2;
    struct err e = {};
    cudaGraphExec_t exec = captured(c, m, rows, sums);
    fill(c, m, rows, seed);
    for (int i = 0; i < replays; i++) CUDA(cudaGraphLaunch(exec, c->op.stream));
    if (wait_for_it(c, &e) != RC_OK) report(c, "graph of %d rows: %s: %s", kern_rows(rows), e.code, e.text);
    compare(c, m, rows, seed, -1, sums * replays, "graph");
    CUDA(cudaGraphExecDestroy(exec));
}

/* ---- sum and norm ---- */

/* The norm on another grid: one block of 256 threads a row, chunk pairs in turn. */
static __global__ void norm_kernel(const float *x, const float *w, struct kern_split rows, int n, float eps, float *y,
                                   void *act)
{
    __shared__ float warp_sum[ROW_NORM_MAX / ROW_NORM_CHUNK][ROW_NORM_WARPS], chunk_sum[ROW_NORM_MAX / ROW_NORM_CHUNK];
    const int row = blockIdx.x, chunks = row_norm_chunks(n), t = threadIdx.x % ROW_NORM_THREADS;
    x += (size_t)row * n, y += (size_t)row * n;
    for (int chunk = threadIdx.x / ROW_NORM_THREADS; chunk < chunks; chunk += blockDim.x / ROW_NORM_THREADS) {
        const int first = chunk * ROW_NORM_CHUNK + t * ROW_NORM_EACH;
        float v[ROW_NORM_EACH];
        for (int i = 0; i < ROW_NORM_EACH; i++) v[i] = first < n ? x[first + i] : 0.0f;
        const float sum = row_norm_warp(row_norm_squares(v));
        if (t % 32 == 0) warp_sum[chunk][t / 32] = sum;
    }
    __syncthreads();
    if ((int)threadIdx.x < chunks) chunk_sum[threadIdx.x] = row_norm_chunk(warp_sum[threadIdx.x]);
    __syncthreads();
    const float scale = row_norm_scale(row_norm_total(chunk_sum, chunks), n, eps);
    for (int k = 2 * threadIdx.x; k < act_blocks(n) * ACT_BLOCK; k += 2 * blockDim.x) {
        float pair[2];
        for (int i = 0; i < 2; i++) pair[i] = k + i < n ? row_norm_apply(x[k + i], scale, w[k + i]) : 0.0f;
        act_store2(act, rows, n, row, k, pair[0], pair[1]);
        for (int i = 0; i < 2; i++)
            if (k + i < n) y[k + i] = pair[i];
    }
}

static void same_bytes(struct child *c, const void *a_dev, const void *b_dev, size_t n_bytes, const char *what,
                       struct kern_split rows)
{
    std::vector<unsigned char> a(n_bytes), b(n_bytes);
    CUDA(cudaMemcpy(a.data(), a_dev, n_bytes, cudaMemcpyDeviceToHost));
    CUDA(cudaMemcpy(b.data(), b_dev, n_bytes, cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < n_bytes; i++) {
        if (a[i] == b[i]) continue;
        report(c, "sum and norm, rows %d + %d: %s differs at byte %zu of %zu", rows.decode, rows.prefill, what, i,
               n_bytes);
        return;
    }
}

static void check_sum_norm(struct child *c, struct memory *m, struct kern_split rows)
{
    const int width = c->plan.width, seed = 5000 + kern_rows(rows);
    const size_t y_bytes = (size_t)kern_rows(rows) * (size_t)width * 4,
                 act_bytes = act_buffer_bytes(rows.decode, rows.prefill, width);
    float *w, *y[2];
    void *act[2];
    std::vector<float> weights((size_t)width);
    struct err e = {};
    for (int i = 0; i < width; i++) weights[(size_t)i] = noise((UINT64_C(5) << 50) + (uint64_t)i);
    CUDA(cudaMalloc((void **)&w, (size_t)width * 4));
    CUDA(cudaMemcpy(w, weights.data(), (size_t)width * 4, cudaMemcpyHostToDevice));
    for (int k = 0; k < 2; k++) {
        CUDA(cudaMalloc((void **)&y[k], y_bytes));
        CUDA(cudaMalloc(&act[k], act_bytes));
        CUDA(cudaMemset(y[k], 0xff, y_bytes));
        CUDA(cudaMemset(act[k], 0xff, act_bytes));
    }
    fill(c, m, rows, seed);
    const bool done = comm_cuda_sum_norm(c->comm, m->partial, rows, width, m->residual, w, 1e-6f, y[0], act[0]);
    if (!done && c->op.sm >= 90 && width <= 8192 && kern_rows(rows) <= 8 && c->plan.path != SUM_NCCL)
        report(c, "sum and norm refused %d rows", kern_rows(rows));
    if (wait_for_it(c, &e) != RC_OK) report(c, "sum and norm: %s: %s", e.code, e.text);
    if (done) {
        norm_kernel<<<(unsigned)kern_rows(rows), 256, 0, c->op.stream>>>(m->residual, w, rows, width, 1e-6f, y[1],
                                                                         act[1]);
        CUDA(cudaStreamSynchronize(c->op.stream));
        compare(c, m, rows, seed, -1, 1, "sum and norm");
        same_bytes(c, y[0], y[1], y_bytes, "y", rows);
        same_bytes(c, act[0], act[1], act_bytes, "act", rows);
        float first = 0; /* and the norm is one */
        double squares = 0;
        for (int i = 0; i < width; i++) squares += (double)m->host[(size_t)i] * (double)m->host[(size_t)i];
        CUDA(cudaMemcpy(&first, y[0], sizeof first, cudaMemcpyDeviceToHost));
        const double should = (double)m->host[0] / sqrt(squares / width + 1e-6) * (double)weights[0];
        if (!(fabs((double)first - should) <= 4e-7 * fabs(should) + 1e-12))
            report(c, "norm: %g, expected %g", (double)first, should);
    }
    CUDA(cudaFree(w));
    for (int k = 0; k < 2; k++) {
        CUDA(cudaFree(y[k]));
        CUDA(cudaFree(act[k]));
    }
}

/* ---- gathers ---- */

static void check_gather(struct child *c, int rows, const int *counts, int round)
{
    struct range range[MAX_RANKS] = {};
    struct err e = {};
    int row_width = 0;
    for (int r = 0; r < c->plan.ranks; r++) {
        range[r].first = row_width + r; /* gaps stay */
        range[r].count = counts[r];
        row_width += counts[r] + r;
    }
    const int mine_count = counts[c->rank];
    std::vector<float> mine((size_t)rows * (size_t)mine_count + 1);
    for (size_t i = 0; i < mine.size(); i++) mine[i] = partial_value(c->rank, 7000 + round, i);
    float *mine_dev, *out;
    const size_t floats = (size_t)rows * (size_t)row_width;
    CUDA(cudaMalloc((void **)&mine_dev, mine.size() * 4));
    CUDA(cudaMemcpy(mine_dev, mine.data(), mine.size() * 4, cudaMemcpyHostToDevice));
    CUDA(cudaDeviceSynchronize()); /* a plain copy may still be under way when it returns */
    CUDA(cudaMallocHost((void **)&out, floats * 4));
    memset(out, 0xa5, floats * 4);
    c->comm->barrier(c->comm, NULL);
    if (c->comm->all_gather_columns(c->comm, mine_dev, rows, range, row_width, out, &e) != RC_OK ||
        wait_for_it(c, &e) != RC_OK)
        report(c, "gather: %s: %s", e.code, e.text);
    std::vector<uint32_t> should(floats, 0xa5a5a5a5u);
    for (int r = 0; r < c->plan.ranks; r++)
        for (int row = 0; row < rows; row++)
            for (int i = 0; i < counts[r]; i++) {
                const int from = c->plan.path == SUM_LOCAL ? c->rank : r;
                const float v = partial_value(from, 7000 + round, (size_t)row * (size_t)counts[r] + (size_t)i);
                memcpy(&should[(size_t)row * (size_t)row_width + (size_t)(range[r].first + i)], &v, 4);
            }
    for (size_t i = 0; i < floats; i++)
        if (memcmp(&should[i], &out[i], 4) != 0) {
            report(c, "gather of %d rows, round %d: place %zu of %zu is wrong", rows, round, i, floats);
            break;
        }
    CUDA(cudaFree(mine_dev));
    CUDA(cudaFreeHost(out));
}

/* ---- bodies ---- */

static struct kern_split split_of(int rows) /* all kinds of mixtures */
{
    struct kern_split s = {rows <= 8 ? (rows % 3 == 0 ? rows / 2 : rows) : rows == 300 ? 0 : 5, 0};
    s.prefill = rows - s.decode;
    return s;
}

static void right_sums(struct child *c)
{
    const int all[] = {1, 2, 3, 4, 5, 6, 7, 8, 64, 300, 2048}, few[] = {1, 3, 8, 64};
    const int equal[MAX_RANKS] = {1237, 1237, 1237, 1237}, uneven[MAX_RANKS] = {5000, 4096, 0, 16};
    const int *sizes = c->plan.quick ? few : all;
    const int n = c->plan.quick ? (int)(sizeof few / sizeof few[0]) : (int)(sizeof all / sizeof all[0]);
    if (!comm_start(c)) return;
    struct memory m = memory_new((size_t)c->plan.max_rows * (size_t)c->plan.width);
    for (int i = 0; i < n && !c->wrong; i++) {
        if (sizes[i] > c->plan.max_rows) continue;
        check_sum(c, &m, split_of(sizes[i]), -1);
        if (i < 2) check_sum(c, &m, split_of(sizes[i]), (c->plan.ranks - 1) * i); /* a rank without a part */
    }
    const int graphs[] = {1, 4, 300};
    for (int rows : graphs)
        if (rows <= c->plan.max_rows && !c->wrong) check_graph(c, &m, split_of(rows));
    const int norms[] = {1, 3, 8, 33};
    for (int rows : norms)
        if (rows <= c->plan.max_rows && !c->wrong) check_sum_norm(c, &m, split_of(rows));
    for (int round = 0; round < 4 && !c->wrong; round++) {
        check_gather(c, 1 + round * 2, equal, round);
        if (c->plan.path != SUM_LOCAL) check_gather(c, 8, uneven, 10 + round);
    }
    memory_free(&m);
    c->comm->barrier(c->comm, NULL);
    c->comm->close(c->comm);
}

static struct plan plan_of(enum sum_path path, int ranks, bool own_cards, int width, int max_rows, bool quick)
{
    struct plan p = {};
    p.ranks = ranks, p.path = path, p.width = width, p.max_rows = max_rows, p.quick = quick;
    for (int r = 0; r < ranks; r++) p.devices[r] = own_cards ? r : 0;
    return p;
}

/* One opening of a context for all widths: starting one takes longer than the sums. */
static void all_widths(struct child *c)
{
    const int widths[] = {64, 576, 5120};
    for (int i = 0; i < 3 && !c->wrong; i++) {
        c->plan.width = widths[i];
        c->plan.max_rows = widths[i] == 5120 && !c->plan.quick ? 2048 : 300;
        right_sums(c);
    }
}

static void check_paths(int ranks, bool own_cards, bool quick)
{
    const enum sum_path paths[] = {SUM_PEER, SUM_HOST, SUM_AUTO};
    for (enum sum_path path : paths) {
        struct plan p = plan_of(path, ranks, own_cards, 0, 0, quick);
        const int64_t begun = clock_now_us();
        assert_true(run_ranks(&p, 20000000, all_widths));
        fprintf(stderr, "%d ranks, %s, %s: %.1f s\n", ranks, own_cards ? "a card each" : "one card",
                sum_path_name(path), (double)(clock_now_us() - begun) / 1e6);
    }
}

static void two_ranks_on_a_card(void **) { check_paths(2, false, false); }
static void three_ranks_on_a_card(void **) { check_paths(3, false, true); }

static void a_card_each(void **)
{
    if (n_cards < 2) skip();
    check_paths(2, true, false);
#if TANDEM_NCCL
    struct plan p = plan_of(SUM_NCCL, 2, true, 0, 0, false);
    assert_true(run_ranks(&p, 20000000, all_widths));
#endif
}

static void alone(void **)
{
    struct plan p = plan_of(SUM_AUTO, 1, false, 0, 0, false);
    assert_true(run_ranks(&p, 20000000, all_widths));
}

static void local_body(struct child *c)
{
    c->segment = NULL;
    all_widths(c);
}

static void pretended_peers(void **)
{
    struct plan p = plan_of(SUM_LOCAL, 2, false, 0, 0, false);
    assert_true(run_ranks(&p, 20000000, local_body));
}

static void refused(struct child *c)
{
    struct err e = {};
    const enum rc rc = comm_new(c, &e);
    if (rc != RC_BAD_INPUT || e.exit_status != EXIT_CONFIG || !strstr(e.text, "share a card"))
        report(c, "NCCL on one card: rc %d, %s: %s", rc, e.code, e.text);
}

static void nccl_needs_a_card_each(void **)
{
    struct plan p = plan_of(SUM_NCCL, 2, false, 64, 8, false);
    assert_true(run_ranks(&p, 20000000, refused));
}

/* Ranks that are threads of one process. */
struct thread_rank {
    struct child child;
    pthread_t id;
};

static void *thread_main(void *argument)
{
    struct child *c = (struct child *)argument;
    CUDA(cudaSetDevice(0));
    if (c->plan.width)
        right_sums(c);
    else
        all_widths(c);
    return NULL;
}

static void as_threads(struct child *c)
{
    struct thread_rank t[2] = {};
    void *memory;
    struct segment *segment = segment_new(2, 20000000, &memory);
    c->plan.ranks = 2;
    for (int r = 0; r < 2; r++) {
        t[r].child = *c;
        t[r].child.segment = segment, t[r].child.rank = r;
        t[r].child.plan.devices[1] = c->plan.width ? 1 : 0; /* where they are told so, they race the paths */
        CUDA(cudaStreamCreateWithFlags(&t[r].child.op.stream, cudaStreamNonBlocking));
        pthread_create(&t[r].id, NULL, thread_main, &t[r].child);
    }
    for (int r = 0; r < 2; r++) {
        pthread_join(t[r].id, NULL);
        c->wrong += t[r].child.wrong;
    }
}

/* ---- trouble ---- */

/* Rank 0 enqueues a sum that nobody answers. */
static void expect_loss(struct child *c, bool poll, int64_t most_us, const char *code)
{
    struct kern_split rows = {4, 0};
    struct memory m = memory_new((size_t)c->plan.max_rows * (size_t)c->plan.width);
    struct err e = {}, again = {};
    CUDA(cudaMemset(m.partial, 0, m.host.size() * sizeof(float)));
    const int64_t begun = clock_now_us();
    c->comm->all_reduce_add(c->comm, m.partial, rows, c->plan.width, m.residual, &e);
    if (!poll) CUDA(cudaStreamSynchronize(c->op.stream));
    const enum rc rc = wait_for_it(c, &e);
    const int64_t took = clock_now_us() - begun;
    fprintf(stderr, "%s: ended after %.2f s: rc %d, %s: %s\n", sum_path_name(c->plan.path), (double)took / 1e6, rc,
            e.code, e.text);
    if (rc != RC_FATAL || took > most_us || !strstr(code, e.code))
        report(c, "expected %s within %.2f s", code, (double)most_us / 1e6);
    const int64_t second = clock_now_us();
    if (c->comm->all_reduce_add(c->comm, m.partial, rows, c->plan.width, m.residual, &again) != RC_FATAL)
        report(c, "a sum after the loss was taken");
    if (wait_for_it(c, &again) != RC_FATAL || clock_now_us() - second > 500000) report(c, "a sum after the loss waits");
    c->comm->close(c->comm);
}

static void peer_dies(struct child *c)
{
    if (!comm_start(c)) return;
    c->comm->barrier(c->comm, NULL);
    if (c->rank == 1) _exit(0);
    expect_loss(c, true, 4000000, "peer_lost peer_stalled group_poisoned");
}

static void peer_is_silent(struct child *c)
{
    if (!comm_start(c)) return;
    c->comm->barrier(c->comm, NULL);
    if (c->rank == 0) return expect_loss(c, false, 4000000, "peer_lost");
    for (int i = 0; i < 300; i++) { /* its host is well */
        segment_beat(c->segment, c->rank);
        sleep_us(10000);
    }
}

static void peer_aborts(struct child *c)
{
    if (!comm_start(c)) return;
    c->comm->barrier(c->comm, NULL);
    if (c->rank == 0) return expect_loss(c, true, 3000000, "group_poisoned");
    sleep_us(200000);
    c->comm->abort(c->comm, "because");
    sleep_us(500000);
}

static void trouble_ends(void **)
{
    const enum sum_path paths[] = {SUM_PEER, SUM_HOST};
    for (enum sum_path path : paths) {
        struct plan p = plan_of(path, 2, n_cards > 1, 576, 8, false);
        assert_true(run_ranks(&p, 1500000, peer_dies));
        assert_true(run_ranks(&p, 1500000, peer_is_silent));
        assert_true(run_ranks(&p, 20000000, peer_aborts));
    }
}

/* Threads that believe to have a card each: their sums run at once, so the race takes no time slices. */
static void paths_are_raced(void **)
{
    struct plan p = plan_of(SUM_AUTO, 1, false, 576, 300, false);
    assert_true(run_ranks(&p, 20000000, as_threads));
}

static void threads_of_one_process(void **)
{
    const enum sum_path paths[] = {SUM_PEER, SUM_HOST};
    for (enum sum_path path : paths) {
        struct plan p = plan_of(path, 1, false, 0, 0, true);
        assert_true(run_ranks(&p, 20000000, as_threads));
    }
}

/* ---- bench ---- */

static double median_us(struct child *c, int sums, void (*body)(struct child *, struct memory *, struct kern_split),
                        struct memory *m, struct kern_split rows)
{
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    cudaEvent_t begin, end;
    std::vector<double> times;
    CUDA(cudaEventCreate(&begin));
    CUDA(cudaEventCreate(&end));
    CUDA(cudaStreamBeginCapture(c->op.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < sums; i++) body(c, m, rows);
    CUDA(cudaStreamEndCapture(c->op.stream, &graph));
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphUpload(exec, c->op.stream));
    CUDA(cudaStreamSynchronize(c->op.stream));
    for (int i = 0; i < 11; i++) {
        float ms;
        c->comm->barrier(c->comm, NULL);
        CUDA(cudaEventRecord(begin, c->op.stream));
        CUDA(cudaGraphLaunch(exec, c->op.stream));
        CUDA(cudaEventRecord(end, c->op.stream));
        CUDA(cudaStreamSynchronize(c->op.stream));
        CUDA(cudaEventElapsedTime(&ms, begin, end));
        if (i > 1) times.push_back(ms * 1e3 / sums);
    }
    std::sort(times.begin(), times.end());
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaGraphDestroy(graph));
    return times[times.size() / 2];
}

static void bench_sum(struct child *c, struct memory *m, struct kern_split rows)
{
    c->comm->all_reduce_add(c->comm, m->partial, rows, c->plan.width, m->residual, NULL);
}

static void *bench_act;
static void bench_sum_norm(struct child *c, struct memory *m, struct kern_split rows)
{
    comm_cuda_sum_norm(c->comm, m->partial, rows, c->plan.width, m->residual, m->partial, 1e-6f, NULL, bench_act);
}

static void bench_gather(struct child *c)
{
    struct range range[MAX_RANKS] = {};
    const int rows = 4, vocab = 248320, part = vocab / c->plan.ranks;
    float *mine, *out;
    std::vector<double> times;
    for (int r = 0; r < c->plan.ranks; r++) range[r].first = r * part, range[r].count = part;
    CUDA(cudaMalloc((void **)&mine, (size_t)rows * (size_t)part * 4));
    CUDA(cudaMemset(mine, 0, (size_t)rows * (size_t)part * 4));
    CUDA(cudaMallocHost((void **)&out, (size_t)rows * (size_t)vocab * 4));
    CUDA(cudaDeviceSynchronize());
    for (int i = 0; i < 9; i++) {
        c->comm->barrier(c->comm, NULL);
        const int64_t begun = clock_now_us();
        if (c->comm->all_gather_columns(c->comm, mine, rows, range, vocab, out, NULL) != RC_OK) report(c, "gather");
        CUDA(cudaStreamSynchronize(c->op.stream));
        if (i) times.push_back((double)(clock_now_us() - begun));
    }
    std::sort(times.begin(), times.end());
    if (c->rank == 0)
        printf("%-5s gather 4 x %d floats: %.0f us\n", sum_path_name(c->plan.path), vocab, times[times.size() / 2]);
}

static void bench_body(struct child *c)
{
    const int sizes[] = {1, 2, 4, 8, 32, 64, 300, 2048};
    bool crowded = false;
    for (int r = 1; r < c->plan.ranks; r++) crowded = crowded || c->plan.devices[r] == c->plan.devices[0];
    if (c->plan.path == SUM_LOCAL) c->segment = NULL, crowded = false;
    if (!comm_start(c)) return;
    struct memory m = memory_new((size_t)c->plan.max_rows * (size_t)c->plan.width);
    CUDA(cudaMemset(m.partial, 0, m.host.size() * 4));
    CUDA(cudaMemset(m.residual, 0, m.host.size() * 2));
    CUDA(cudaMalloc(&bench_act, act_buffer_bytes(64, 0, c->plan.width)));
    CUDA(cudaDeviceSynchronize());
    for (int rows : sizes) {
        struct kern_split split = {std::min(rows, 64), std::max(0, rows - 64)};
        const int sums = crowded ? 2 : rows > 64 ? 10 : 200;
        const double us = median_us(c, sums, bench_sum, &m, split);
        const bool norm = rows <= 32 && !crowded && c->plan.path != SUM_NCCL;
        const double norm_us = norm ? median_us(c, sums, bench_sum_norm, &m, split) : 0;
        if (c->rank == 0)
            printf("%-5s %d ranks %4d rows x %d: sum %.2f us, with norm %.2f us (by %s)\n", sum_path_name(c->plan.path),
                   c->plan.ranks, rows, c->plan.width, us, norm_us, sum_path_name(comm_cuda_path(c->comm, rows)));
        fflush(stdout);
    }
    bench_gather(c);
    fflush(stdout);
    c->comm->barrier(c->comm, NULL);
}

static int bench(void)
{
    const enum sum_path paths[] = {SUM_LOCAL, SUM_AUTO, SUM_PEER, SUM_HOST, SUM_NCCL};
    bool good = true;
    for (enum sum_path path : paths) {
        struct plan p = plan_of(path, 2, n_cards > 1, 5120, 2048, false);
        p.bench = true;
        if (path == SUM_NCCL && n_cards < 2) continue;
        if (path == SUM_LOCAL || path == SUM_AUTO) {
            struct plan one = p;
            one.ranks = 1;
            if (path == SUM_AUTO) good = run_ranks(&one, 20000000, bench_body) && good;
        }
        good = run_ranks(&p, 20000000, bench_body) && good;
    }
    return good ? 0 : 1;
}

static int count_cards(void)
{
    int status = 0;
    const pid_t pid = fork();
    if (pid == 0) {
        int n = 0;
        if (cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
        _exit(n < MOST_CARDS ? n : MOST_CARDS);
    }
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 0;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(alone),
        cmocka_unit_test(pretended_peers),
        cmocka_unit_test(two_ranks_on_a_card),
        cmocka_unit_test(three_ranks_on_a_card),
        cmocka_unit_test(nccl_needs_a_card_each),
        cmocka_unit_test(trouble_ends),
        cmocka_unit_test(threads_of_one_process),
        cmocka_unit_test(paths_are_raced),
        cmocka_unit_test(a_card_each),
    };
    n_cards = count_cards();
    if (!n_cards) {
        fprintf(stderr, "SKIPPED: no CUDA device, these tests did not run\n");
        return SKIPPED;
    }
    if (argc > 1 && strcmp(argv[1], "bench") == 0) return bench();
    if (argc > 1) cmocka_set_test_filter(argv[1]);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
