"""The table of the faults that the supervision must survive, for tests and the report.

The rows with numbers are from a list that gives each fault a grade, A or B. The rows with letters
were added later. A row is proven by the tests of this folder whose mark has its number, by the
tests in `elsewhere`, or by both.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAINERS, CONSOLE = "tests/trainers", "tests/console"
RUN, DISK = f"{TRAINERS}/test_run.py", f"{TRAINERS}/test_disk.py"
CHECKPOINT = f"{TRAINERS}/test_checkpoint.py"
ACTIONS, TRUTH = f"{CONSOLE}/test_actions.py", f"{CONSOLE}/supervisor/test_truth.py"
TARGETS, NVML = f"{CONSOLE}/test_targets.py", f"{CONSOLE}/sources/test_nvml.py"
SAVER, RESUME = f"{TRAINERS}/test_saver.py", f"{TRAINERS}/test_resume.py"
SECURITY = f"{CONSOLE}/test_security.py"
TUI, CROSS_CHECK = f"{CONSOLE}/tui", f"{CONSOLE}/supervisor/test_cross_check.py"
PARSING, TAILING = (f"{CONSOLE}/plans/test_flags_and_plan.py", f"{CONSOLE}/sources/test_tail.py")


@dataclass(frozen=True, slots=True)
class Row:
    """One fault. `limit_s`, if not None, bounds the median of the times that its tests measure."""

    number: str
    grade: str
    fault: str
    limit_s: float | None = None
    elsewhere: tuple[str, ...] = ()
    """Node ids of tests outside this folder that prove the row, or a part of it."""


ROWS: tuple[Row, ...] = (
    Row("1", "A", "rank SIGKILL", 2.0),
    Row("2", "A", "rank raises, exits 7, runs out of CUDA memory", 2.0),
    Row("3", "A", "SIGSEGV, abort", 2.0),
    Row("4", "A", "one rank sleeps in forward, stall limit 2 s", 4.0),
    Row("5", "A", "stall in C with the GIL held, stall limit 2 s", 4.0),
    Row("6", "A", "stall in a backward hook"),
    Row("7", "A", "loader stall, loader child killed",
        elsewhere=(f"{TRAINERS}/test_loader.py::"
                   "test_every_fetch_has_a_time_limit_and_says_what_did_not_come",)),
    Row("8", "A", "SIGSTOP of a rank, then CONT; named after 3 s", 5.0),
    Row("9", "A", "torchrun SIGKILL", 2.0),
    Row("10", "A", "SIGUSR1 sprayed at torchrun, its group and its ranks"),
    Row("11", "A", "console or launcher kill -9, mid-run and at each step of a launch"),
    Row("12", "A", "terminal vanishes"),
    Row("13", "A", "two consoles, both halt"),
    Row("14", "A", "two launches into one directory", elsewhere=(
        f"{ACTIONS}::test_exactly_one_of_fifty_launches_wins_and_the_others_say_who_did",
    )),
    Row("15", "A", "stale .HALT"),
    Row("16", "A", "disk full", elsewhere=(
        f"{DISK}::test_a_full_disk_costs_records_and_nothing_else",
        f"{DISK}::test_a_full_disk_costs_no_good_checkpoint_and_a_gone_directory_is_named",
        f"{TRUTH}::test_on_a_full_disk_a_halt_ends_the_plan_and_the_last_word_is_kept",
    )),
    Row("17", "A", "run directory read-only, not allowed, missing", elsewhere=(
        f"{DISK}::test_a_read_only_or_deleted_directory_is_named_and_the_last_checkpoint_stays_good",
    )),
    Row("18", "A", "kill during a checkpoint, at ten moments", elsewhere=(
        f"{CHECKPOINT}::test_a_save_killed_at_any_moment_leaves_a_checkpoint_that_verifies",
        f"{CHECKPOINT}::test_what_a_killed_save_left_is_cleared_or_put_back_by_the_next",
    )),
    Row("19", "A", "truncated, zeroed, bit-flipped checkpoint", elsewhere=(
        f"{CHECKPOINT}::test_a_damaged_checkpoint_is_told_and_the_one_before_is_taken",
    )),
    Row("20", "A", "NaN on one rank", elsewhere=(
        f"{RUN}::test_a_rank_with_nan_makes_all_skip_and_the_run_ends_with_10",
    )),
    Row("21", "A", "garbage in heartbeats"),
    Row("22", "A", "terminal escapes in logs, figures and names"),
    Row("23", "A", "port in use"),
    Row("24", "A", "rank deaf to TERM: from the stop to zero processes, grace 2 s", 3.0),
    Row("25", "B", "wall clock jumps"),
    Row("26", "B", "pid reuse"),
    Row("27", "B", "zombie rank"),
    Row("28", "B", "rank in uninterruptible sleep"),
    Row("29", "B", "restart loop"),
    Row("30", "B", "rank dies in the middle of a record"),
    Row("31", "B", "links, other owners, open modes", elsewhere=(
        f"{SECURITY}::test_a_lock_that_is_another_file_too_is_not_written",
        f"{SECURITY}::test_a_directory_of_somebody_else_is_refused_for_launch_and_for_requests",
        f"{SECURITY}::test_an_empty_directory_that_was_open_is_closed",
        f"{ACTIONS}::test_a_file_as_a_launch_directory_is_refused",
        f"{ACTIONS}::test_a_halt_is_not_written_through_a_link_in_somebodys_launch",
        f"{ACTIONS}::test_a_request_is_not_written_through_a_link",
        f"{CONSOLE}/sources/test_text.py::test_no_log_is_read_through_a_link",
        f"{TAILING}::test_what_is_not_a_regular_file_is_not_opened",
    )),
    Row("32", "B", "hostile run directory", elsewhere=(
        f"{CHECKPOINT}::test_an_index_that_wants_to_run_code_is_refused",
        f"{PARSING}::test_yaml_tricks_are_refused_by_name",
    )),
    Row("33", "B", "injection by environment and arguments", elsewhere=(
        f"{SECURITY}::test_what_a_training_inherits_is_shown_before_the_start",
        f"{SECURITY}::test_a_plan_sets_no_variable_but_a_flag_on_one_line",
        f"{SECURITY}::test_shell_metacharacters_in_args_are_one_argument_each",
    )),
    Row("34", "B", "one rank is 30 % slower"),
    Row("35", "B", "alert hook hangs, fails, floods; many alerts", elsewhere=(
        f"{CONSOLE}/supervisor/test_hooks.py::"
        "test_what_comes_meanwhile_is_told_at_once_with_its_count",
        f"{CONSOLE}/supervisor/test_hooks.py::"
        "test_a_hook_that_hangs_is_ended_with_everything_it_started_and_nothing_waits_for_it",
        f"{CONSOLE}/supervisor/test_hooks.py::"
        "test_a_failure_that_repeats_is_told_once_and_then_that_it_works_again",
    )),
    Row("a", "A", "supervisor SIGKILL", 3.0),
    Row("b", "A", "SIGSTOP of the supervisor", 3.0),
    Row("c", "A", "frozen file system under the run", elsewhere=(
        f"{CONSOLE}/supervisor/test_frozen_directory.py::"
        "test_a_frozen_directory_blocks_only_its_writer_and_loses_nothing",
    )),
    Row("d", "B", "lying NVML: 100 % at 70 W"),
    Row("e", "A", "lines of torchrun in its log, written by a rank"),
    Row("f", "A", "shared memory of the run removed (RemoveIPC=yes)"),
    Row("g", "A", "launch directory moved away, launched into again, replaced by a copy"),
    Row("h", "A", "a pulse that stands still while steps go on, a false loss of one rank"),
    Row("i", "A", "records that no program writes: 1e308, 2^60, NaN"),
    Row("w", "A", "working process of the supervisor SIGKILL, SIGSEGV, SIGSTOP", 3.0),
    Row("j", "A", "signals that mean nothing to the supervisor"),
    Row("k", "B", "a run directory that cannot be read when an attempt begins"),
    Row("l", "B", "a stop of a stalled run"),
    Row("m", "B", "a request again after many others", elsewhere=(
        f"{CONSOLE}/supervisor/test_inbox.py::"
        "test_a_request_is_not_executed_again_after_many_others",
    )),
    Row("n", "B", ".HALT in the launch directory"),
    Row("o", "B", "other code at a restart"),
    Row("p", "A", "NaN, stall and crash in the first attempt; missing records", elsewhere=(
        f"{CONSOLE}/supervisor/test_gates_span.py::"
        "test_nan_stall_and_crash_of_the_first_attempt_fail_the_gates_of_the_run",
        f"{CONSOLE}/supervisor/test_gates_span.py::"
        "test_the_plan_ends_where_exits_and_records_disagree",
        f"{CONSOLE}/test_go.py::test_it_is_no_go_when_they_disagree",
        f"{CONSOLE}/plans/test_histories.py::test_no_gate_passes_whose_bound_the_truth_breaks",
    )),
    Row("q", "A", "names, copies and hosts that mean another run", elsewhere=(
        f"{TARGETS}::test_one_id_of_two_launches_is_refused_with_both",
        f"{TARGETS}::test_a_directory_that_is_a_copy_or_was_moved_is_only_looked_at",
        f"{TARGETS}::test_an_uncertain_latest_is_refused_with_both",
        f"{TARGETS}::test_documents_of_a_living_supervisor_in_a_copy_are_refused",
        f"{CONSOLE}/test_other_hosts.py::"
        "test_from_another_host_a_request_is_sent_and_its_answer_counts",
        f"{TARGETS}::test_an_unreadable_document_is_named_and_the_action_refused",
    )),
    Row("r", "B", "full disk while the owner is named; umask 777", elsewhere=(
        f"{CONSOLE}/supervisor/test_lock.py::"
        "test_a_disk_that_is_full_when_the_owner_is_named_begins_nothing",
        f"{TARGETS}::test_a_launch_works_and_is_closed_to_others_under_any_umask",
    )),
    Row("s", "A", "a background save that meets an error or a lost peer", elsewhere=(
        f"{SAVER}::test_whatever_is_raised_in_the_background_ends_the_wait_and_is_told",
        f"{SAVER}::test_an_error_of_the_training_lets_a_background_save_end",
        f"{SAVER}::test_a_save_that_a_peer_leaves_is_given_up_and_its_files_go_with_the_next",
    )),
    Row("t", "A", "ranks that see different checkpoints", elsewhere=(
        f"{RESUME}::test_ranks_that_list_other_checkpoints_resume_what_rank_0_chooses",
        f"{RESUME}::test_a_rank_that_cannot_read_what_rank_0_chose_ends_all_with_15",
    )),
    Row("u", "B", "NVML: silent, refused, absent, an Xid of another GPU", elsewhere=(
        f"{NVML}::test_each_xid_is_counted_on_the_gpu_that_it_is_about",
        f"{NVML}::test_a_sensor_that_is_refused_leaves_the_others",
        f"{NVML}::test_a_library_and_then_a_driver_that_come_late_are_found",
        f"{NVML}::test_nvml_that_cannot_be_initialised_is_an_error_of_each_gpu",
        f"{CONSOLE}/plans/test_gpus.py::"
        "test_a_driver_that_hangs_is_reported_in_time_and_the_process_ends",
    )),
    Row("v", "B", "a screen that is pasted into, not read, late, or started beside planted files",
        elsewhere=(
            f"{TUI}/test_input.py::test_a_large_paste_does_nothing",
            f"{TUI}/test_leaving.py::test_q_ends_it_where_the_terminal_reads_nothing",
            f"{TUI}/test_late.py::"
            "test_a_launch_that_takes_long_is_told_and_no_second_one_is_asked_about",
            f"{SECURITY}::test_a_command_imports_nothing_from_the_working_directory",
        )),
    Row("x", "A", "one file of a launch altered while nobody supervises it", elsewhere=(
        f"{CROSS_CHECK}::test_what_one_file_alone_says_ends_nothing_at_a_take_over",
        f"{CROSS_CHECK}::test_an_end_that_nobody_saw_is_a_good_one_where_the_pulses_confirm_it",
        f"{CROSS_CHECK}::test_a_plan_that_says_otherwise_than_the_run_is_not_taken_over",
        f"{CROSS_CHECK}::test_a_flag_of_the_run_needs_the_plan_an_answer_or_a_process",
        f"{CROSS_CHECK}::test_a_phase_is_behind_where_its_run_and_its_records_say_that_it_passed",
        f"{CONSOLE}/supervisor/test_monitor.py::"
        "test_who_comes_late_acts_on_no_pulse_that_it_has_not_seen_change",
    )),
    Row("y", "B", "requests from before a take-over; clocks an hour ahead or late", elsewhere=(
        f"{CONSOLE}/supervisor/test_inbox.py::"
        "test_a_request_from_before_this_supervisor_is_not_executed",
        f"{CONSOLE}/supervisor/test_inbox.py::"
        "test_the_time_of_a_request_is_that_of_its_file_and_not_what_it_tells",
    )),
    Row("z", "A", "a call on a file of the run fails: EIO, ENOSPC, EMFILE, once or for good"),
)  # fmt: skip

BY_NUMBER = {row.number: row for row in ROWS}
