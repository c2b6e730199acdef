/* RANK:KIND@STEP: every kind, and everything that is almost one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine.h"

static void kinds_are_read(void **state)
{
    (void)state;
    const struct {
        const char *text;
        struct fault expected;
    } good[] = {
        {"0:exit@1", {FAULT_EXIT, 0, 1}},     {"1:kill@2", {FAULT_KILL, 1, 2}},
        {"2:stop@30", {FAULT_STOP, 2, 30}},   {"3:hang@007", {FAULT_HANG, 3, 7}},
        {"1:token@12", {FAULT_TOKEN, 1, 12}}, {"0:state@18446744073709551615", {FAULT_STATE, 0, UINT64_MAX}},
        {"0:plan@5", {FAULT_PLAN, 0, 5}},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct fault f = {0};
        assert_int_equal(fault_parse(good[i].text, &f, NULL), RC_OK);
        assert_int_equal(f.kind, good[i].expected.kind);
        assert_int_equal(f.rank, good[i].expected.rank);
        assert_int_equal(f.step, good[i].expected.step);
    }
}

static void others_are_refused(void **state)
{
    (void)state;
    const char *bad[] = {"",
                         "@",
                         ":",
                         "1",
                         "1:",
                         "1:@1",
                         "1@1",
                         "@1:exit",
                         "1:token",
                         "1:token@",
                         "1:token@0",
                         "1:token@-1",
                         "1:token@+1",
                         "1:token@ 1",
                         "1:token@1 ",
                         "1:token@1x",
                         "1:token@18446744073709551616",
                         "1:token@99999999999999999999999",
                         "4:token@1",
                         "-1:token@1",
                         "01:token@1",
                         " 1:token@1",
                         "1:tok@1",
                         "1:tokens@1",
                         "1:TOKEN@1",
                         "1:none@1",
                         "1;token@1",
                         "1:token@1@2",
                         "1::token@1"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct fault f = {FAULT_HANG, 3, 9};
        struct err e = {0};
        assert_int_equal(fault_parse(bad[i], &f, &e), RC_BAD_INPUT);
        assert_int_equal(e.exit_status, EXIT_USAGE);
        assert_int_equal(f.kind, FAULT_HANG); /* untouched */
        assert_int_equal(f.step, 9);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(kinds_are_read), cmocka_unit_test(others_are_refused)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
