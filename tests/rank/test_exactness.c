/* The exactness contract, ranks as threads: a request's tokens and traces are the same bits alone or batched, reversed, under
 * preemption, with drafts or without, from a snapshot or cold, however its prompt is cut and whatever the thread count; every
 * rank count repeats itself. On a tiny model of random weights, and on a trained model given as the first argument.
 *
 * The second argument is the backend. On CUDA, where there is one rank in a process, also: replayed from recordings or launched
 * kernel by kernel. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine_group.h"
#include "tiny_gguf.h"
#include "tokenizer.h"

enum { N_REQUESTS = 5, TRAINED_REQUESTS = 4, MAX_PROMPT = 400 };

struct fixture {
    const char *model;
    char tiny[64];
    bool trained; /* a model whose drafts are often right; it is slower, too */
    int n, ranks; /* requests, most ranks */
    enum group_backend backend;
    struct engine_group_result alone[MAX_RANKS + 1][KV_FORMATS][N_REQUESTS]; /* see alone_of */
    int32_t prompts[N_REQUESTS][MAX_PROMPT];
    struct engine_request requests[N_REQUESTS];
};
static const char *model_argument;
static enum group_backend backend_argument;

/* Two greedy requests, three sampled ones, the second of them with penalties. */
static void make_request(struct fixture *f, int i, int prompt_tokens, int max_tokens)
{
    struct sampling sampling = sampling_default();
    sampling.seed = 1000 + (uint64_t)i;
    sampling.temperature = i < 2 ? 0 : i < 4 ? 0.2f : 0.4f;
    if (i == 4) sampling.top_p = 0.9f, sampling.top_k = 40;
    if (i == 3) sampling.repetition_penalty = 1.05f, sampling.presence_penalty = 0.1f, sampling.frequency_penalty = 0.02f;
    f->requests[i] = (struct engine_request){.id = 10 + (uint64_t)i, .prompt = f->prompts[i],
                                             .prompt_tokens = (size_t)prompt_tokens, .max_tokens = max_tokens,
                                             .sampling = sampling, .ignore_end = true};
}

/* Prompts that end on, before and after block borders, and repeat themselves. */
static int setup_tiny(struct fixture *f)
{
    static const int prompt_tokens[N_REQUESTS] = {64, 1, 200, 383, 127}, max_tokens[N_REQUESTS] = {260, 300, 256, 270, 257};
    snprintf(f->tiny, sizeof f->tiny, "/tmp/tandem-exactness-%d.gguf", getpid());
    struct tiny_gguf t = tiny_gguf_default();
    if (!tiny_gguf_write(&t, f->tiny)) return -1;
    f->model = f->tiny;
    f->n = N_REQUESTS;
    f->ranks = 4;
    for (int i = 0; i < N_REQUESTS; i++) {
        for (int j = 0; j < prompt_tokens[i]; j++) f->prompts[i][j] = 3 + (i * 7919 + j * 31 + j * j) % 256;
        make_request(f, i, prompt_tokens[i], max_tokens[i]);
    }
    return 0;
}

/* Package descriptions of the kind that hybrid-small was trained on. */
static int setup_trained(struct fixture *f)
{
    static const char *const texts[TRAINED_REQUESTS] = {
        "Summarize this package description in one short line.\n\n"
        "A small library that reads and writes archives. This package contains the shared library. The archives may be "
        "compressed, and the library finds out by itself how. It can be used from C and from C++ programs. This package "
        "contains the shared library and nothing else; see libarc-dev for the headers.",
        "Extract the package, its section and its dependencies as compact JSON.\n\n"
        "Package: libarc-tools\nSection: utils\nDepends: libarc1, libc6, zlib1g, liblzma5\n"
        "Description: command line tools for small archives. They list, read and write archives.",
        "Extract the package, its section and its dependencies as compact JSON.\n\n"
        "Package: python3-arc\nSection: python\nDepends: python3, libarc1, libc6\n"
        "Description: Python bindings of the archive library. This package contains the module for Python.",
        "Summarize this package description in one short line.\n\n"
        "Documentation of the archive library in HTML. It has a tutorial, a reference of all functions, and examples.",
    };
    struct model_file *m = NULL;
    struct tokenizer *t = NULL;
    struct err e = {0};
    enum rc rc = model_file_open(f->model, &m, &e);
    if (rc == RC_OK) rc = tokenizer_open(m, &t, &e);
    for (int i = 0; i < TRAINED_REQUESTS && rc == RC_OK; i++) {
        struct token_list ids = {0};
        char prompt[1024];
        snprintf(prompt, sizeof prompt, "<|im_start|>user\n%s<|im_end|>\n<|im_start|>assistant\n", texts[i]);
        rc = tokenizer_encode(t, prompt, strlen(prompt), true, &ids, &e);
        if (rc == RC_OK && ids.len > MAX_PROMPT) rc = RC_FAILED;
        for (size_t j = 0; j < ids.len && rc == RC_OK; j++) f->prompts[i][j] = ids.ids[j];
        make_request(f, i, (int)ids.len, 256 + 3 * i);
        token_list_free(&ids);
    }
    tokenizer_close(t);
    model_file_close(m);
    if (rc != RC_OK) print_error("%s: %s\n", e.code, e.text);
    f->n = TRAINED_REQUESTS;
    f->ranks = 2;
    f->trained = true;
    return rc == RC_OK ? 0 : -1;
}

static int setup(void **state)
{
    struct fixture *f = calloc(1, sizeof *f);
    *state = f;
    f->model = model_argument;
    f->backend = backend_argument;
    const int status = model_argument ? setup_trained(f) : setup_tiny(f);
    if (f->backend != GROUP_CPU) f->ranks = 1;
    return status;
}

static int teardown(void **state)
{
    struct fixture *f = *state;
    if (f->tiny[0]) unlink(f->tiny);
    for (int ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int kv = 0; kv < KV_FORMATS; kv++) engine_group_free(f->alone[ranks][kv], N_REQUESTS);
    free(f);
    return 0;
}

static struct engine_group group_of(const struct fixture *f, int ranks, enum kv_format kv)
{
    struct engine_options o = {.model_path = f->model, .ranks = ranks, .active = 4, .context = 1024, .kv = kv, .trace = true};
    return (struct engine_group){.options = o, .backend = f->backend, .threads = 1, .bounds = lockstep_bounds_default()};
}

static int two_ranks(const struct fixture *f) { return f->ranks < 2 ? f->ranks : 2; }

static void run(struct engine_group *g, const struct engine_request *requests, size_t n, struct engine_group_result *out)
{
    if (!engine_group_run(g, requests, n, out)) {
        for (int r = 0; r < g->options.ranks; r++) print_error("rank %d: %s: %s\n", r, g->err[r].code, g->err[r].text);
        fail();
    }
}

static void assert_same(const struct engine_group_result *a, const struct engine_group_result *b)
{
    assert_int_equal(a->kind, ENGINE_EVENT_DONE);
    assert_int_equal(b->kind, ENGINE_EVENT_DONE);
    assert_int_equal(a->n_tokens, b->n_tokens);
    assert_int_equal(a->finish, b->finish);
    for (size_t i = 0; i < a->n_tokens; i++) {
        if (a->tokens[i] != b->tokens[i] || a->trace[2 * i] != b->trace[2 * i] || a->trace[2 * i + 1] != b->trace[2 * i + 1])
            fail_msg("token %zu of %zu differs", i, a->n_tokens);
    }
    assert_string_equal(a->text, b->text);
    assert_int_equal(b->timing.rounds + b->timing.accepted + 1, b->n_tokens);
}

static void assert_all_same(const struct fixture *f, const struct engine_group_result *a, const struct engine_group_result *b)
{
    for (int i = 0; i < f->n; i++) {
        assert_true(a[i].n_tokens >= 256);
        assert_same(&a[i], &b[i]);
    }
}

/* The drafts that decided nothing were there: right ones and wrong ones. */
static void assert_drafted(const struct engine_group *g)
{
    assert_true(g->stats.accepted > 0);
    assert_true(g->stats.drafted > g->stats.accepted);
}

/* The yardstick: each request alone, without drafts. Run once for all tests. */
static const struct engine_group_result *alone_of(struct fixture *f, int ranks, enum kv_format kv)
{
    struct engine_group_result *out = f->alone[ranks][kv];
    for (int i = 0; i < f->n && !out[i].tokens; i++) {
        struct engine_group g = group_of(f, ranks, kv);
        g.options.spec = SPEC_OFF;
        run(&g, &f->requests[i], 1, &out[i]);
        assert_int_equal(g.stats.max_sequences_in_step, 1);
        assert_int_equal(g.stats.drafted, 0);
    }
    return out;
}

static void test_alone_batched_reversed(void **state)
{
    struct fixture *f = *state;
    for (int ranks = 1; ranks <= f->ranks; ranks++) {
        const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
        struct engine_group_result batched[N_REQUESTS];
        struct engine_group g = group_of(f, ranks, KV_F16);
        run(&g, f->requests, (size_t)f->n, batched);
        assert_true(g.stats.max_sequences_in_step >= 3);
        assert_drafted(&g);
        assert_all_same(f, alone, batched);
        engine_group_free(batched, (size_t)f->n);

        struct engine_request reversed[N_REQUESTS];
        struct engine_group_result back[N_REQUESTS];
        for (int i = 0; i < f->n; i++) reversed[i] = f->requests[f->n - 1 - i];
        g.options.drafts = KERN_MAX_DRAFTS;
        g.options.active = 3; /* slots are used again */
        run(&g, reversed, (size_t)f->n, back);
        for (int i = 0; i < f->n; i++) batched[i] = back[f->n - 1 - i];
        assert_all_same(f, alone, batched);
        engine_group_free(batched, (size_t)f->n);
    }
}

/* Where no trace needs them, logits of greedy rows stay with the backend, which finds the best token itself: the same. */
static void test_without_traces(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result out[N_REQUESTS];
    for (int ranks = 1; ranks <= two_ranks(f); ranks++) {
        const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
        struct engine_group g = group_of(f, ranks, KV_F16);
        g.options.trace = false;
        run(&g, f->requests, (size_t)f->n, out);
        for (int i = 0; i < f->n; i++) {
            assert_int_equal(out[i].n_tokens, alone[i].n_tokens);
            assert_memory_equal(out[i].tokens, alone[i].tokens, alone[i].n_tokens * sizeof *alone[i].tokens);
            assert_string_equal(out[i].text, alone[i].text);
        }
        engine_group_free(out, (size_t)f->n);
    }
}

/* Every request alone with every source of drafts: greedy, sampled and penalized ones all have right and wrong drafts. */
static void test_drafts_alone(void **state)
{
    struct fixture *f = *state;
    const struct engine_group_result *alone = alone_of(f, 1, KV_F16);
    struct engine_group_result drafted;
    for (enum spec_mode spec = f->trained ? SPEC_MTP : SPEC_NGRAM; spec <= SPEC_NGRAM; spec++) {
        int64_t n_drafted = 0, accepted = 0;
        for (int i = 0; i < f->n; i++) {
            struct engine_group g = group_of(f, 1, KV_F16);
            g.options.spec = spec;
            run(&g, &f->requests[i], 1, &drafted);
            assert_same(&alone[i], &drafted);
            n_drafted += drafted.timing.drafted;
            accepted += drafted.timing.accepted;
            engine_group_free(&drafted, 1);
        }
        assert_true(n_drafted > accepted && accepted > 0);
        if (spec == SPEC_MTP) assert_true((double)accepted > 0.3 * (double)n_drafted);
    }
}

static void test_preemption_and_prompt_cuts(void **state)
{
    struct fixture *f = *state;
    static const int prefill_rows[] = {64, 1024, 128};
    struct engine_group_result batched[N_REQUESTS];
    for (int kv = 0; kv < (f->trained ? 1 : KV_FORMATS); kv++) {
        const struct engine_group_result *alone = alone_of(f, two_ranks(f), (enum kv_format)kv);
        for (int c = 0; c < (f->trained ? 2 : 3); c++) {
            struct engine_group g = group_of(f, two_ranks(f), (enum kv_format)kv);
            g.options.prefill_rows = prefill_rows[c];
            g.options.spec = f->trained && c ? SPEC_MTP : SPEC_AUTO;
            g.options.context = 704;
            g.options.kv_tokens = 832; /* together they need far more */
            run(&g, f->requests, (size_t)f->n, batched);
            assert_true(g.stats.preemptions > 0);
            assert_drafted(&g);
            assert_all_same(f, alone, batched);
            engine_group_free(batched, (size_t)f->n);
        }
    }
}

static void test_threads(void **state)
{
    struct fixture *f = *state;
    if (f->trained || f->backend != GROUP_CPU) skip();
    struct engine_group_result three[N_REQUESTS];
    struct engine_group g = group_of(f, 1, KV_F16);
    g.threads = 3;
    run(&g, f->requests, (size_t)f->n, three);
    assert_all_same(f, alone_of(f, 1, KV_F16), three);
    engine_group_free(three, (size_t)f->n);
}

/* A replayed round and one launched kernel by kernel are the same bits: alone, and beside others with drafts, which takes
 * rounds of many shapes. With the yardstick of the same KV format from the backend that was asked for. */
static void test_recordings(void **state)
{
    struct fixture *f = *state;
    static const enum kv_format formats[] = {KV_F16, KV_INT8};
    struct engine_group_result out[N_REQUESTS];
    if (f->backend == GROUP_CPU) skip();
    for (int i = 0; i < 4; i++) {
        const struct engine_group_result *alone = alone_of(f, 1, formats[i / 2]);
        struct engine_group g = group_of(f, 1, formats[i / 2]);
        g.backend = i % 2 ? GROUP_CUDA_PLAIN : GROUP_CUDA;
        g.options.drafts = KERN_MAX_DRAFTS;
        run(&g, f->requests, (size_t)f->n, out);
        assert_drafted(&g);
        assert_all_same(f, alone, out);
        assert_int_equal(g.replays > 0, g.backend == GROUP_CUDA);
        engine_group_free(out, (size_t)f->n);
        g.options.spec = SPEC_OFF;
        for (int j = 0; j < f->n; j++) {
            run(&g, &f->requests[j], 1, out);
            assert_same(&alone[j], out);
            assert_int_equal(g.replays > 100, g.backend == GROUP_CUDA); /* most of its 256 rounds and more */
            engine_group_free(out, 1);
        }
    }
}

/* Ranks add in different orders, so texts may part at a near-tie; the first greedy tokens must not. */
static void test_rank_counts_agree(void **state)
{
    struct fixture *f = *state;
    if (f->ranks < 2) skip();
    const struct engine_group_result *one = alone_of(f, 1, KV_F16);
    for (int ranks = 2; ranks <= f->ranks; ranks++)
        assert_memory_equal(one->tokens, alone_of(f, ranks, KV_F16)->tokens, 32 * sizeof *one->tokens);
}

static size_t ascii_run(const char *text)
{
    size_t n = 0;
    while (text[n] > 0) n++;
    return n;
}

/* Ends the request by a stop string that the whole answer contains, without drafts and with. Returns how many right drafts were
 * no part of the answer. */
static uint64_t stop_at(const struct fixture *f, struct engine_request r, const char *stop, const char *whole)
{
    struct engine_group_result plain, cut;
    struct engine_group g = group_of(f, two_ranks(f), KV_F16);
    const char *stops[] = {"never to be seen", stop}, *first = strstr(whole, stop);
    r.stop = stops;
    r.n_stop = 2;
    g.options.spec = SPEC_OFF;
    run(&g, &r, 1, &plain);
    g.options.spec = SPEC_AUTO;
    g.options.drafts = KERN_MAX_DRAFTS;
    run(&g, &r, 1, &cut);
    assert_same(&plain, &cut);
    assert_int_equal(cut.finish, FINISH_STOP);
    if (first == whole || first[-1] > 0) /* else half a character may have been left out */
        assert_int_equal(strlen(cut.text), (size_t)(first - whole));
    assert_memory_equal(cut.text, whole, strlen(cut.text));
    uint64_t beyond = g.stats.accepted - (uint64_t)cut.timing.accepted;
    engine_group_free(&plain, 1);
    engine_group_free(&cut, 1);
    return beyond;
}

/* Stop strings end a request exactly before their first occurrence, wherever token borders and rounds lie; what a round sampled
 * beyond is no part of the answer. The tiny model is given a prompt that it answers with repeated ASCII text. */
static void test_stop_strings(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result whole;
    struct engine_group g = group_of(f, two_ranks(f), KV_F16);
    struct engine_request r = f->requests[1];
    int32_t prompt[32];
    for (int i = 0; i < 32; i++) prompt[i] = 3 + 'a' + i % 3 * 3;
    if (!f->trained) r.prompt = prompt, r.prompt_tokens = 32;
    run(&g, &r, 1, &whole);
    size_t len = strlen(whole.text), at = len / 8;
    uint64_t beyond = 0;
    int tried = 0;
    for (; tried < 12; tried++, at += len / 20) {
        while (whole.text[at] && ascii_run(whole.text + at) < 3) at++;
        if (!whole.text[at]) break;
        size_t n = ascii_run(whole.text + at), most = tried % 2 ? 24 : 3;
        char stop[25];
        snprintf(stop, sizeof stop, "%.*s", (int)(n < most ? n : most), whole.text + at);
        beyond += stop_at(f, r, stop, whole.text);
    }
    assert_true(tried >= 4);
    assert_true(beyond > 0);
    engine_group_free(&whole, 1);
}

/* End tokens end a request within a round, too, on every rank. */
static void test_end_tokens(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result plain[N_REQUESTS], drafted[N_REQUESTS];
    struct engine_request requests[N_REQUESTS];
    struct engine_group g = group_of(f, two_ranks(f), KV_F16);
    int ended = 0;
    for (int i = 0; i < f->n; i++) {
        requests[i] = f->requests[i];
        requests[i].ignore_end = false;
    }
    g.options.spec = SPEC_OFF;
    run(&g, requests, (size_t)f->n, plain);
    g.options.spec = SPEC_AUTO;
    g.options.drafts = KERN_MAX_DRAFTS;
    run(&g, requests, (size_t)f->n, drafted);
    for (int i = 0; i < f->n; i++) {
        assert_same(&plain[i], &drafted[i]);
        ended += drafted[i].finish == FINISH_STOP;
    }
    assert_true(ended > 0);
    engine_group_free(drafted, (size_t)f->n);
    /* On its own task 99% of the trained model's first drafts are right; of an MTP layer that has not seen the prompt, 30%. */
    if (f->trained) {
        g.options.spec = SPEC_MTP;
        g.options.drafts = 1;
        run(&g, &requests[1], 1, drafted);
        assert_same(&plain[1], drafted);
        assert_true(drafted[0].timing.drafted > 10);
        assert_true((double)drafted[0].timing.accepted > 0.8 * (double)drafted[0].timing.drafted);
        engine_group_free(drafted, 1);
    }
    engine_group_free(plain, (size_t)f->n);
}

/* ---- snapshots ---- */

enum { SAVED_AT = 64, LONGEST = 2 }; /* LONGEST: a request whose prompt is longer than SAVED_AT */

static void save(const struct fixture *f, int ranks, struct buf saved[MAX_RANKS], struct engine_group_result *out)
{
    struct engine_group g = group_of(f, ranks, KV_F16);
    g.options.prefill_rows = 64;
    g.save_id = f->requests[LONGEST].id;
    g.save_position = SAVED_AT;
    g.saved = saved;
    run(&g, f->requests, (size_t)f->n, out);
    for (int r = 0; r < ranks; r++) assert_true(saved[r].len > SAVED_AT * sizeof(int32_t));
}

static void free_saved(struct buf saved[MAX_RANKS])
{
    for (int r = 0; r < MAX_RANKS; r++) buf_free(&saved[r]);
}

/* Saved beside others and without harm; loaded by a request with the same beginning and another end: the same bits as cold. */
static void test_snapshots(void **state)
{
    struct fixture *f = *state;
    const int least = f->trained ? two_ranks(f) : 1, most = f->trained ? 2 : 3;
    for (int ranks = least; ranks <= most && ranks <= f->ranks; ranks++) {
        struct buf saved[MAX_RANKS] = {0};
        const struct engine_group_result *alone = alone_of(f, ranks, KV_F16);
        struct engine_group_result batched[N_REQUESTS], cold, warm;
        save(f, ranks, saved, batched);
        assert_all_same(f, alone, batched);
        engine_group_free(batched, (size_t)f->n);

        int32_t prompt[MAX_PROMPT];
        struct engine_request r = f->requests[LONGEST];
        memcpy(prompt, r.prompt, r.prompt_tokens * sizeof *prompt);
        for (int tokens = (int)r.prompt_tokens; tokens > SAVED_AT; tokens = tokens > SAVED_AT + 1 ? SAVED_AT + 1 : 0) {
            r.prompt = prompt;
            r.prompt_tokens = (size_t)tokens;
            prompt[SAVED_AT] = 7; /* the very next token is another one */
            struct engine_group g = group_of(f, ranks, KV_F16);
            g.options.prefill_rows = 64;
            g.options.spec = f->trained ? SPEC_MTP : SPEC_OFF;
            run(&g, &r, 1, &cold);
            assert_int_equal(g.stats.restored_rows, 0);
            if (!f->trained) g.options.spec = SPEC_NGRAM;
            g.load_id = r.id;
            g.load = saved;
            run(&g, &r, 1, &warm);
            assert_int_equal(g.stats.restored_rows, SAVED_AT);
            assert_int_equal(g.stats.prefill_rows, tokens - SAVED_AT);
            assert_same(&cold, &warm);
            if (f->trained) { /* the MTP layer's rows came back as well: the very same drafts */
                assert_true(warm.timing.accepted > 0);
                assert_int_equal(warm.timing.drafted, cold.timing.drafted);
                assert_int_equal(warm.timing.accepted, cold.timing.accepted);
            }
            engine_group_free(&cold, 1);
            engine_group_free(&warm, 1);
        }
        struct engine_request others[N_REQUESTS];
        memcpy(others, f->requests, sizeof others);
        struct engine_group g = group_of(f, ranks, KV_F16); /* beside others, and preempted */
        g.options.context = 704;
        g.options.kv_tokens = 832;
        g.load_id = r.id;
        g.load = saved;
        run(&g, others, (size_t)f->n, batched);
        assert_int_equal(g.stats.restored_rows, SAVED_AT);
        assert_all_same(f, alone, batched);
        engine_group_free(batched, (size_t)f->n);
        free_saved(saved);
    }
}

static void assert_refused(struct engine *e, const struct engine_request *r)
{
    struct err err = {0};
    assert_int_equal(engine_submit(e, r, &err), RC_BAD_INPUT);
    assert_string_equal(err.code, "bad_snapshot");
    assert_false(engine_busy(e));
}

/* Damaged in the header, the tokens or the state, cut, extended; or for another prompt, all refused at the door. */
static void odd_snapshots(struct engine *e, const struct buf *saved, struct engine_request r)
{
    size_t len = saved->len;
    char *odd = malloc(len + 1);
    int32_t prompt[MAX_PROMPT];
    r.snapshot = odd;
    r.snapshot_bytes = len;
    for (size_t at = 0; at < len; at += at < 96 ? 1 : len / 50) {
        memcpy(odd, saved->data, len);
        odd[at] ^= 1;
        assert_refused(e, &r);
    }
    memcpy(odd, saved->data, len);
    const size_t lengths[] = {0, 1, 71, 72, 400, len - 1, len + 1};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        r.snapshot_bytes = lengths[i];
        assert_refused(e, &r);
    }
    r.snapshot_bytes = len;
    memcpy(prompt, r.prompt, r.prompt_tokens * sizeof *prompt);
    r.prompt = prompt;
    prompt[SAVED_AT - 1]++;
    assert_refused(e, &r); /* another beginning */
    prompt[SAVED_AT - 1]--;
    r.prompt_tokens = SAVED_AT;
    assert_refused(e, &r); /* no token after it */
    free(odd);
}

/* An engine of one rank in this thread, on which `with` is called. */
static void with_engine(enum group_backend backend, struct engine_options o,
                        void (*with)(struct engine *, const struct buf *, struct engine_request),
                        const struct buf *saved, struct engine_request r)
{
    struct lockstep_bounds bounds = lockstep_bounds_default();
    struct kern *kern = NULL;
    struct comm *comm = NULL;
    struct engine *engine = NULL;
    struct engine_comm_shape shape;
    assert_int_equal(engine_comm_shape(&o, &shape, NULL), RC_OK);
    size_t comm_bytes = engine_comm_bytes(shape);
    size_t n = (segment_bytes(1, comm_bytes) + 63) / 64 * 64;
    void *memory = aligned_alloc(64, n);
    memset(memory, 0, n);
    segment_init(memory, 1, comm_bytes, &bounds);
    struct segment *segment = segment_attach(memory, n, 1, NULL);
    const struct group_backend_options b = {backend, NULL, 1, 0, 1, segment, shape};
    assert_int_equal(group_backend_open(&b, &kern, &comm, NULL), RC_OK);
    assert_int_equal(engine_open(&o, kern, comm, segment, &engine, NULL), RC_OK);
    with(engine, saved, r);
    engine_close(engine);
    comm->close(comm);
    kern->close(kern);
    free(memory);
}

static void foreign_snapshot(struct engine *e, const struct buf *saved, struct engine_request r)
{
    r.snapshot = saved->data;
    r.snapshot_bytes = saved->len;
    assert_refused(e, &r);
}

static void test_odd_snapshots(void **state)
{
    struct fixture *f = *state;
    struct buf saved[MAX_RANKS] = {0};
    struct engine_group_result out[N_REQUESTS];
    struct engine_request r = f->requests[LONGEST];
    struct engine_options o = group_of(f, 1, KV_F16).options;
    if (f->ranks >= 2) {
        save(f, 2, saved, out);
        with_engine(f->backend, o, foreign_snapshot, &saved[0], r); /* a half of two ranks */
        engine_group_free(out, (size_t)f->n);
        free_saved(saved);
    }
    save(f, 1, saved, out);
    engine_group_free(out, (size_t)f->n);
    with_engine(f->backend, o, odd_snapshots, &saved[0], r);
    o.kv = KV_F32;
    with_engine(f->backend, o, foreign_snapshot, &saved[0], r);
    o.kv = KV_F16;
    o.weights = KERN_WEIGHTS_W8;
    with_engine(f->backend, o, foreign_snapshot, &saved[0], r);
    free_saved(saved);
}

/* Shares of two positions under one request: the group stops, before a token comes of it. */
static void test_snapshots_of_two_positions(void **state)
{
    struct fixture *f = *state;
    struct buf early[MAX_RANKS] = {0}, late[MAX_RANKS] = {0};
    struct engine_group_result out[N_REQUESTS], none;
    if (f->ranks < 2) skip();
    for (int i = 1; i <= 2; i++) {
        struct engine_group g = group_of(f, 2, KV_F16);
        g.options.prefill_rows = 64;
        g.save_id = f->requests[LONGEST].id;
        g.save_position = 64 * i;
        g.saved = i == 1 ? early : late;
        run(&g, &f->requests[LONGEST], 1, out);
        engine_group_free(out, 1);
    }
    buf_free(&early[1]);
    early[1] = late[1];
    late[1] = (struct buf){0};
    struct engine_group g = group_of(f, 2, KV_F16);
    g.load_id = f->requests[LONGEST].id;
    g.load = early;
    assert_false(engine_group_run(&g, &f->requests[LONGEST], 1, &none));
    assert_int_equal(g.stats.steps, 0);
    engine_group_free(&none, 1);
    free_saved(early);
    free_saved(late);
}

/* A source of drafts that the model does not have. */
static void test_mtp_is_refused(void **state)
{
    struct fixture *f = *state;
    struct engine_group_result none;
    struct engine_group g = group_of(f, 1, KV_F16);
    if (f->trained) skip();
    g.options.spec = SPEC_MTP;
    assert_false(engine_group_run(&g, f->requests, 1, &none));
    assert_string_equal(g.err[0].code, "no_mtp");
    assert_int_equal(g.err[0].exit_status, EXIT_CONFIG);
}

/* Faults that leave the process alive are found by the compare of the very step, on either rank. */
static void test_disagreement_is_found(void **state)
{
    struct fixture *f = *state;
    static const enum fault_kind kinds[] = {FAULT_TOKEN, FAULT_STATE, FAULT_PLAN};
    if (f->ranks < 2) skip();
    for (int i = 0; i < 12; i += f->trained ? 3 : 1) {
        struct engine_group g = group_of(f, 2, KV_F16);
        struct engine_group_result result;
        g.options.fault = (struct fault){.kind = kinds[i / 4], .rank = i % 2, .step = i / 2 % 2 ? 1 : 20};
        assert_false(engine_group_run(&g, &f->requests[0], 1, &result));
        assert_true(g.err[0].exit_status == EXIT_LOCKSTEP || g.err[1].exit_status == EXIT_LOCKSTEP);
        assert_int_equal(g.stats.steps, g.options.fault.step - 1);
        engine_group_free(&result, 1);
    }
}

/* Without an argument, or "tiny": a tiny model made on the spot. With one: that trained model, or a made-up one whose MTP layer
 * agrees. */
int main(int argc, char **argv)
{
    if (argc > 2 && !group_backend_parse(argv[2], &backend_argument)) {
        fputs("usage: test_exactness [MODEL|tiny [cpu|cuda|cuda-plain]]\n", stderr);
        return 64;
    }
    if (!group_backend_there(backend_argument)) return 77;
    if (argc > 1 && strcmp(argv[1], "tiny") != 0) model_argument = argv[1];
    bool made_up = model_argument && !strncmp(model_argument, "synth:", 6);
    if (model_argument && !made_up && access(model_argument, R_OK) != 0) {
        print_message("SKIPPED: there is no %s\n", model_argument);
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone_batched_reversed),     cmocka_unit_test(test_without_traces),
        cmocka_unit_test(test_drafts_alone),               cmocka_unit_test(test_preemption_and_prompt_cuts),
        cmocka_unit_test(test_threads),                    cmocka_unit_test(test_recordings),
        cmocka_unit_test(test_rank_counts_agree),          cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_end_tokens),                 cmocka_unit_test(test_snapshots),
        cmocka_unit_test(test_odd_snapshots),              cmocka_unit_test(test_snapshots_of_two_positions),
        cmocka_unit_test(test_mtp_is_refused),             cmocka_unit_test(test_disagreement_is_found),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
