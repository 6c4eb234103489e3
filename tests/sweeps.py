"""Sweeps: tests whose members go one way, of which `make test` runs a few and `make sweep` all.

It runs special cases, too, of whose mechanism `make test` runs other tests (`LEFT`).

`make test` is to take 9 minutes on two cores. Members that run are evenly spaced from the first to
the last, so that each of two crossed parameters changes. A test that is named by its id runs in any
case.
"""

from __future__ import annotations

import collections

import pytest

RUN = {
    "test_advice.py::test_a_refusal_names_parts_that_can_be_planned": 1,
    "test_advice.py::test_adapters": 1,
    "test_advice.py::test_advice_for_a_whole_model_plans_its_parts": 1,
    "test_advice.py::test_advice_is_followed_literally": 5,
    "test_agreement.py::test_nobody_waits_for_one_that_decides_nothing": 2,
    "test_available.py::test_an_optimizer_has_room_before_it_has_state": 2,
    "test_available.py::test_gradients_take_room_as_they_come": 1,
    "test_available.py::test_steps_of_training_stay_within_what_is_free": 2,
    "test_backward.py::test_a_loss_and_its_parts_need_one_plan": 1,
    "test_backward.py::test_an_input_used_outside_adds_as_documented": 2,
    "test_backward.py::test_autocast_casts_inputs_as_in_eager": 1,
    "test_backward.py::test_contributions_of_another_plan_add_as_in_eager": 1,
    "test_backward.py::test_contributions_to_one_gradient_do_not_wait": 1,
    "test_backward.py::test_forwards_that_change_what_they_read_use_copies": 2,
    "test_backward.py::test_gradients_of_a_known_loss_need_one_plan": 1,
    "test_backward.py::test_gradients_of_extremes_also_where_they_overflow": 3,
    "test_backward.py::test_gradients_of_inputs_and_parameters_apart_are_refused": 1,
    "test_backward.py::test_heads_in_turn": 1,
    "test_backward.py::test_incoming_gradients_in_other_strides": 1,
    "test_backward.py::test_interruption_leaves_nothing_behind": 2,
    "test_backward.py::test_other_memory_between_forward_and_backward_is_refused": 1,
    "test_backward.py::test_second_backward_through_a_retained_graph": 1,
    "test_bad_input.py::test_a_too_small_budget_names_shares_and_owners": 1,
    "test_bad_input.py::test_checkpoints_that_change_nothing_more_are_planned": 2,
    "test_bad_input.py::test_cumulative_products": 1,
    "test_bad_input.py::test_data_that_stays_in_its_memory_is_planned": 2,
    "test_bad_input.py::test_draws_from_what_the_module_holds_are_refused": 4,
    "test_bad_input.py::test_losses_over_alignments_are_planned": 2,
    "test_bad_input.py::test_other_cross_entropies_are_planned": 1,
    "test_bad_input.py::test_packages_named_like_pytorch_are_not_it": 2,
    "test_bad_input.py::test_sparse_buffers_that_nobody_reads_do_not_matter": 1,
    "test_bad_input.py::test_sparse_matrices_are_refused_by_their_layout": 3,
    "test_bad_input.py::test_values_of_activations_that_python_reads_are_refused": 4,
    "test_bad_input.py::test_what_is_changed_inside_a_checkpoint_is_refused": 1,
    "test_best.py::test_blocks_take_kernels_that_gain": 1,
    "test_best.py::test_what_gains_nothing_leaves_the_bits_of_eager": 1,
    "test_block_sequence.py::test_no_choice_is_faster_within_the_budget": 15,
    "test_block_sequence.py::test_the_limit_is_what_may_be_kept": 5,
    "test_blocks.py::test_blocks_page_however_late_copies_are": 1,
    "test_blocks.py::test_blocks_train_as_eager_within_their_prediction": 2,
    "test_blocks_calls.py::test_a_configuration_that_the_first_step_settles": 1,
    "test_blocks_calls.py::test_blocks_by_another_name": 1,
    "test_blocks_calls.py::test_blocks_in_containers_are_found": 1,
    "test_blocks_calls.py::test_blocks_that_give_back_an_argument": 1,
    "test_blocks_calls.py::test_containers_that_change_after_the_call": 1,
    "test_blocks_calls.py::test_found_blocks_without_gradient_are_left": 1,
    "test_blocks_calls.py::test_optimizers_inside_of_backward": 1,
    "test_blocks_calls.py::test_transforms_beside_blocks": 1,
    "test_blocks_inputs.py::test_backward_passes_of_all_kinds": 4,
    "test_blocks_inputs.py::test_calls_that_come_otherwise_later": 1,
    "test_blocks_inputs.py::test_however_late_copies_are": 1,
    "test_blocks_inputs.py::test_inputs_that_are_parts_or_held_by_others": 2,
    "test_blocks_inputs.py::test_what_several_blocks_hold": 2,
    "test_blocks_trainers.py::test_losses_without_logits_train_as_the_original": 1,
    "test_blocks_trainers.py::test_trl": 1,
    "test_budget.py::test_a_loss_as_expected_needs_one_recording": 1,
    "test_bypassed.py::test_a_replaced_forward_is_said_once": 1,
    "test_bypassed.py::test_copies_are_watched_for_themselves": 1,
    "test_bypassed.py::test_forwards_around_the_planned_one_run_it": 1,
    "test_bypassed.py::test_originals_run_as_options_say_are_right": 1,
    "test_bypassed.py::test_right_uses_say_nothing": 2,
    "test_bypassed.py::test_training_by_parts_is_said_once": 2,
    "test_cache.py::test_a_plan_is_not_used_where_inputs_differ": 3,
    "test_cache.py::test_a_plan_that_lies_is_not_used": 2,
    "test_cache.py::test_costs_that_cannot_be_are_measured_again": 2,
    "test_cache.py::test_documents_with_valid_digests_are_still_checked": 2,
    "test_cache.py::test_operators_allocating_outside_pytorch_have_costs": 1,
    "test_cli.py::test_a_signal_ends_with_its_exit_code": 1,
    "test_cli.py::test_explanations_are_within_80_columns": 1,
    "test_cli.py::test_plot_a_picture": 1,
    "test_cli.py::test_plot_a_plan_file": 1,
    "test_constraints.py::test_chain_obeys": 4,
    "test_constraints.py::test_keep": 1,
    "test_constraints.py::test_keep_all_is_the_fastest_that_obeys": 6,
    "test_constraints.py::test_recompute": 2,
    "test_constraints.py::test_refusals": 3,
    "test_constraints.py::test_stage_formulation_is_optimal_under_constraints": 6,
    "test_copies.py::test_bytes_go_by_the_order_alone": 20,
    "test_copies.py::test_the_clock_is_the_longest_path": 20,
    "test_dp_recurrence.py::test_coarse_buckets_never_exceed_the_limit": 5,
    "test_dp_recurrence.py::test_equals_brute_force": 24,
    "test_dp_recurrence.py::test_long_chains_keep_their_limits_and_bounds": 8,
    "test_dp_search.py::test_chain_never_underestimates": 5,
    "test_dp_search.py::test_dropping_dead_runs_keeps_schedules_legal": 5,
    "test_dp_search.py::test_links_cost_what_the_options_say": 5,
    "test_dp_search.py::test_never_beats_all_schedules_of_a_tiny_graph": 8,
    "test_dp_search.py::test_schedules_are_legal_within_their_budget": 5,
    "test_draft.py::test_memory_is_the_simulators_after_every_change": 8,
    "test_draft.py::test_what_is_left_out_leaves_nothing_idle": 4,
    "test_dynamo.py::test_traced_modules_are_planned": 1,
    "test_dynamo.py::test_what_is_refused_says_what_to_do": 3,
    "test_dynamo.py::test_whole_graphs_train_as_eager": 1,
    "test_effects.py::test_calls_are_those_of_eager": 2,
    "test_effects.py::test_declared_pure_runs_again_and_is_measured": 1,
    "test_effects.py::test_errors_are_those_of_eager": 1,
    "test_effects.py::test_factorizations_that_fail": 1,
    "test_effects.py::test_gradients_in_other_strides_call_nothing_twice": 1,
    "test_effects.py::test_kernels_cast_inside_as_in_eager": 2,
    "test_effects.py::test_plans_of_kernels_call_what_acts": 2,
    "test_emit.py::test_random_schedules": 1,
    "test_eviction.py::test_schedules_are_legal_and_within_budget": 5,
    "test_exact_search.py::test_reruns_before_the_turn_leave_the_loss_room": 4,
    "test_exchange.py::test_exchanged_schedules_are_legal_and_no_slower": 2,
    "test_exchange.py::test_squeezed_schedules_are_legal_and_need_no_more": 5,
    "test_experts.py::test_ties_break_alike_when_routers_run_again": 1,
    "test_first_call.py::test_in_place_what_can_be_is_planned": 4,
    "test_first_call.py::test_no_part_can_be_planned": 1,
    "test_first_call.py::test_parts_instead_of_the_whole": 1,
    "test_first_call.py::test_parts_without_options_of_the_whole": 2,
    "test_fit.py::test_a_length_beyond_the_model_is_refused": 1,
    "test_fit.py::test_an_optimizer_allocates_what_is_said": 4,
    "test_fit.py::test_first_calls_that_keep_tables_are_the_users": 1,
    "test_fit.py::test_frozen_models_have_gradients_of_inputs_only": 1,
    "test_fit.py::test_kept_whole_has_what_formulas_keep": 1,
    "test_fit.py::test_optimizers_stepping_in_backward_need_what_is_said": 1,
    "test_fit.py::test_schedules_need_what_they_stand_for": 1,
    "test_fit.py::test_sizes_of_one_recording_are_those_of_captures": 1,
    "test_fit.py::test_sizes_that_follow_no_expression_are_right": 1,
    "test_fit.py::test_steps_of_a_plan_need_what_is_said": 1,
    "test_fit_as_on_cuda.py::test_masks_of_dropout_take_one_byte": 1,
    "test_fit_compiled.py::test_steps_of_compiled_kernels_need_what_is_said": 1,
    "test_fit_paging.py::test_rows_are_of_schedules_that_can_run": 1,
    "test_fit_scheduled.py::test_the_most_bytes_are_the_simulators_peak": 20,
    "test_fit_scheduled.py::test_what_stays_is_alive_in_later_steps": 8,
    "test_fit_shards.py::test_a_rank_holds_its_part_and_gathers": 1,
    "test_fit_shards.py::test_a_remedy_is_one_that_helps": 5,
    "test_fit_shards.py::test_blocks_page_where_that_takes_less_time": 1,
    "test_foreign_kernels.py::test_addresses_are_no_test_for_one_tensor": 2,
    "test_foreign_kernels.py::test_addresses_of_all_kinds_of_tensors_are_refused": 2,
    "test_foreign_kernels.py::test_functions_on_arrays_are_told_what_would_work": 2,
    "test_foreign_kernels.py::test_kernels_are_refused_by_name": 3,
    "test_foreign_kernels.py::test_memory_that_is_written_before_it_is_read": 4,
    "test_foreign_kernels.py::test_memory_that_nothing_has_written_is_not_read": 3,
    "test_foreign_kernels.py::test_one_tensor_is_told_from_two": 3,
    "test_fusion.py::test_a_compiler_that_makes_nothing_is_missing": 1,
    "test_fusion.py::test_a_losss_gradient_is_computed_element_by_element": 1,
    "test_fusion.py::test_check_refuses_kernels_that_are_wrong": 2,
    "test_fusion.py::test_kinds_of_networks": 1,
    "test_fusion.py::test_masks_are_stored_where_writing_them_is_fast": 1,
    "test_fusion.py::test_networks_of_many_operators": 1,
    "test_fusion.py::test_what_is_not_fused": 5,
    "test_fuzz.py::test_random_networks_are_as_eager_execution": 1,
    "test_given.py::test_results_in_containers_of_the_caller": 1,
    "test_graph_memory.py::test_gradients_of_several_slices_add_up": 6,
    "test_hooks.py::test_a_gradient_that_the_caller_holds": 1,
    "test_hooks.py::test_an_optimizer_may_step_inside_backward": 1,
    "test_hooks.py::test_gradients_that_wait_are_within_the_budget": 1,
    "test_hooks.py::test_hooks_may_change_what_had_its_gradient": 1,
    "test_hooks.py::test_hooks_may_not_change_what_is_read": 1,
    "test_hooks.py::test_hooks_registered_later_are_another_kind": 1,
    "test_hooks.py::test_incoming_gradients_of_another_pattern": 1,
    "test_hooks.py::test_schedules_in_which_gradients_wait_are_legal": 4,
    "test_ilp_options.py::test_transformer_blocks": 1,
    "test_ilp_stages.py::test_optimum_is_that_of_the_listing": 1,
    "test_in_flight.py::test_blocks_of_calls_in_flight_keep_the_budget": 1,
    "test_in_flight.py::test_options_without_effect_are_refused": 2,
    "test_in_flight.py::test_plans_for_calls_in_flight_keep_the_budget": 1,
    "test_in_place.py::test_element_by_element_reads_may_be_written_over": 4,
    "test_in_place.py::test_kernels_are_listed_once_a_call": 1,
    "test_in_place.py::test_what_reads_another_element_is_written_elsewhere": 4,
    "test_indices.py::test_trials_read_within_tensors": 4,
    "test_least_peak.py::test_relaxations_within_less_and_less_are_starts": 1,
    "test_lengths.py::test_another_graph_is_planned_anew": 1,
    "test_lengths.py::test_other_sizes_run_the_known_plan": 1,
    "test_lengths.py::test_the_overhead_is_a_new_plans": 1,
    "test_lengths.py::test_the_peak_of_unusual_operands_is_promised": 1,
    "test_measure.py::test_predicted_peak_is_the_measured_one": 2,
    "test_measure.py::test_results_from_outside_do_not_lower_workspaces": 3,
    "test_measure.py::test_the_peak_is_met_where_operands_are_conjugated": 1,
    "test_measure.py::test_the_peak_is_met_where_storages_are_copied": 2,
    "test_models.py::test_enough_budget_means_no_recomputation": 1,
    "test_models.py::test_equal_within_budget_and_as_predicted": 1,
    "test_models.py::test_minimum_is_feasible_and_much_less_is_not": 1,
    "test_modes.py::test_other_rules_of_distributed_tensors_have_plans": 1,
    "test_new_tensors.py::test_the_same_is_made": 11,
    "test_only_loss.py::test_the_loss_is_eagers_without_other_leaves": 2,
    "test_opaque.py::test_a_model_of_functions_such_as_liger_has": 1,
    "test_opaque.py::test_a_run_that_is_another_is_refused": 3,
    "test_opaque.py::test_bits_are_those_of_eager": 2,
    "test_orders.py::test_bits": 1,
    "test_orders.py::test_gradients_of_an_input_are_added_in_order": 3,
    "test_paging.py::test_a_hook_that_raises_between_slices": 1,
    "test_paging.py::test_accumulation_and_calls_whose_backward_never_comes": 1,
    "test_paging.py::test_an_error_amid_copies_leaves_nothing_behind": 1,
    "test_paging.py::test_bits_are_eagers_on_every_link": 1,
    "test_paging.py::test_each_wait_is_needed": 1,
    "test_paging.py::test_other_models_page_too": 1,
    "test_paging.py::test_several_calls_in_flight": 1,
    "test_paging_options.py::test_bits_are_eagers_whatever_the_link_does": 1,
    "test_paging_options.py::test_folders_are_tried_when_a_plan_is_made": 2,
    "test_paging_plans.py::test_bits_are_eagers_at_the_predicted_peak": 1,
    "test_pareto.py::test_a_budgets_point_is_the_fastest_that_fits": 1,
    "test_pareto.py::test_the_curve_falls_from_minimum_to_keep_all": 1,
    "test_partition.py::test_real_models_partition": 2,
    "test_passes.py::test_without_any_one_pass_training_is_eagers": 2,
    "test_pebbles.py::test_no_schedule_goes_below": 5,
    "test_pebbles.py::test_no_schedule_that_is_known_goes_below": 5,
    "test_pebbles.py::test_what_the_caller_holds_stays": 5,
    "test_peers.py::test_exact_is_the_fastest_of_its_class": 4,
    "test_peers.py::test_nothing_is_recomputed_where_everything_fits": 9,
    "test_peers.py::test_saved_tensors_are_the_best_subset": 6,
    "test_peers.py::test_schedules_are_legal_and_possible": 5,
    "test_pipeline.py::test_plans_without_a_stage_are_legal_or_refused": 1,
    "test_pipeline.py::test_the_least_peak_needs_no_single_stage": 1,
    "test_pipeline.py::test_the_search_for_time_needs_no_single_stage": 2,
    "test_planning.py::test_the_smallest_budget_that_is_named_works": 1,
    "test_prune.py::test_constraints_are_obeyed_when_much_is_left_out": 4,
    "test_prune.py::test_no_single_reexecution_can_be_left_out": 4,
    "test_python_state.py::test_a_classifier_settles_its_configuration_as_in_eager": 1,
    "test_python_state.py::test_is_planned_as_eager_or_refused": 12,
    "test_python_state.py::test_slots_are_read_and_written_by_themselves": 3,
    "test_quantized.py::test_changes_inside_of_wrappers_are_noticed": 1,
    "test_quantized.py::test_frozen_wrappers_are_planned_as_inner_tensors": 1,
    "test_quantized.py::test_functions_that_a_parameter_overrides_run": 1,
    "test_quantized.py::test_gradients_of_trained_wrappers_are_of_the_whole": 1,
    "test_recipes.py::test_recipes_have_the_originals_bits": 3,
    "test_refusals_followed.py::test_what_keeps_a_table_of_constants_is_planned": 2,
    "test_refusals_followed.py::test_what_keeps_a_tensor_is_planned_afterwards": 1,
    "test_render.py::test_pictures_are_pictures": 1,
    "test_reorder.py::test_bits": 1,
    "test_reorder.py::test_equal_blocks_stay_equal": 1,
    "test_replanning.py::test_a_variable_that_is_read_is_noticed": 2,
    "test_replanning.py::test_at_planning_it_is_our_error_with_cause": 2,
    "test_replanning.py::test_classes_without_a_hash": 1,
    "test_replanning.py::test_copies_go_on_counting": 1,
    "test_replanning.py::test_new_kinds_are_planned_for_earlier_backwards": 1,
    "test_replanning.py::test_script_variables_named_like_attributes_are_others": 1,
    "test_replanning.py::test_the_forwards_errors_leave_as_themselves": 2,
    "test_replanning.py::test_what_changed_is_named_and_nothing_else": 3,
    "test_results.py::test_products_are_as_their_kernels_make_them": 4,
    "test_results.py::test_remembered_results_are_the_fake_modes": 4,
    "test_returned.py::test_a_changed_result_that_backward_reads_is_noticed": 2,
    "test_returned.py::test_gradients_between_results_are_refused": 2,
    "test_returned.py::test_hooks_on_results_behind_others_are_refused": 1,
    "test_returned.py::test_hooks_on_results_see_as_in_eager": 3,
    "test_returned.py::test_leaves_that_are_let_go_are_not_counted": 1,
    "test_returned.py::test_one_of_several_leaves_changes_in_place": 1,
    "test_returned.py::test_results_that_share_memory_may_not_change": 1,
    "test_returned.py::test_results_without_common_elements_may_change": 1,
    "test_signature.py::test_an_argument_that_is_changed": 1,
    "test_signature.py::test_arguments_that_are_not_read_make_no_kind": 2,
    "test_signature.py::test_arguments_without_a_hash": 1,
    "test_signature.py::test_attributes_that_are_not_read_make_no_kind": 2,
    "test_signature.py::test_boolean_and_integer_buffers_that_python_reads": 2,
    "test_signature.py::test_buffers_that_the_forward_changes_and_python_reads": 2,
    "test_signature.py::test_integer_inputs_that_python_reads": 2,
    "test_signature.py::test_values_that_python_calls_equal_differ": 3,
    "test_signature.py::test_views_that_are_conjugated_or_negated_when_read": 1,
    "test_signature.py::test_what_is_no_number_is_itself": 2,
    "test_signature.py::test_what_the_forward_reads_of_an_attribute": 3,
    "test_signature.py::test_which_argument_is_a_tensor_of_the_module": 1,
    "test_sizes.py::test_arguments_change_their_kind_and_size": 2,
    "test_sizes.py::test_numbers_in_arithmetic_are_data": 2,
    "test_sizes.py::test_one_program_runs_all_sizes": 2,
    "test_sizes.py::test_one_program_with_kernels_runs_all_sizes": 1,
    "test_sizes.py::test_resampling_to_one_size_leaves_others_open": 2,
    "test_sizes.py::test_special_sizes_leave_others_open": 3,
    "test_sizes.py::test_what_decides_by_a_size_stays_right": 2,
    "test_slices.py::test_a_forward_is_told_of_its_arguments_base": 1,
    "test_slices.py::test_a_forward_is_told_where_arguments_begin": 1,
    "test_slices.py::test_arguments_that_overlap_and_are_written_to": 1,
    "test_slices.py::test_opaque_functions_are_given_slices": 1,
    "test_slices.py::test_slices_of_one_tensor_run_one_plan": 2,
    "test_starts.py::test_a_budget_that_is_accepted_holds": 1,
    "test_starts.py::test_what_backward_is_taken_to_start_from": 2,
    "test_takeover.py::test_a_product_takes_all_that_it_adds_to": 6,
    "test_takeover.py::test_files_name_pairs_where_an_operation_makes_several": 1,
    "test_takeover.py::test_retained_graphs_and_forwards_in_flight": 1,
    "test_takeover.py::test_training_is_bitwise_eager_and_as_predicted": 1,
    "test_takeover.py::test_what_overwrites_an_operand_is_bitwise_the_result": 10,
    "test_tiled.py::test_models_of_transformers": 1,
    "test_tiled.py::test_no_result_has_the_logits_of_all_rows": 1,
    "test_tiled.py::test_only_tied_weights_gradients_differ": 1,
    "test_tiled.py::test_results_and_gradients_are_those_of_eager": 1,
    "test_tiled.py::test_the_size_of_parts": 2,
    "test_tiled.py::test_what_mixes_rows_is_left_whole_and_said": 3,
    "test_tiny.py::test_plans_of_tiny_models_are_near_the_optimum": 1,
    "test_token_log_probs.py::test_plans_have_eagers_bits_within_budget": 1,
    "test_token_log_probs.py::test_values_and_gradients_are_those_of_logits": 6,
    "test_trainers.py::test_a_default_model_is_planned_without_its_cache": 1,
    "test_trainers.py::test_trainer": 1,
    "test_trainers.py::test_trainers_calls_take_over_the_samples_plan": 1,
    "test_trainers.py::test_trl": 1,
    "test_untouched.py::test_commands": 1,
    "test_untouched.py::test_files_imported_by_the_first_forward_stay_registered": 1,
    "test_untouched.py::test_planning_the_whole_writes_nothing": 1,
    "test_untouched.py::test_what_a_forward_writes_is_put_back": 3,
    "test_usage.py::test_a_check_gives_inputs_like_the_callers": 1,
    "test_usage.py::test_a_check_leaves_model_and_sample_alone": 1,
    "test_usage.py::test_a_graph_that_is_not_retained_is_gone": 1,
    "test_usage.py::test_autocast": 1,
    "test_usage.py::test_checkpoint_around_a_planned_module": 1,
    "test_usage.py::test_compiled_parts_are_planned_as_in_eager": 1,
    "test_usage.py::test_copies_are_planned_and_independent": 1,
    "test_usage.py::test_copies_of_plans_with_literals_of_torch": 1,
    "test_usage.py::test_dtypes": 1,
    "test_usage.py::test_forward_mode_derivatives_are_refused": 1,
    "test_usage.py::test_functional_calls_backward_is_planned_with_its_parameters": 1,
    "test_usage.py::test_instances_of_a_planned_class_are_not_planned": 1,
    "test_usage.py::test_modules": 4,
    "test_usage.py::test_names_of_the_original_come_first": 1,
    "test_usage.py::test_nothing_requires_a_gradient_for_a_while": 1,
    "test_usage.py::test_parameters_of_another_kind_are_planned_for": 1,
    "test_usage.py::test_parameters_that_are_replaced_are_let_go": 1,
    "test_usage.py::test_pruned_layers": 1,
    "test_usage.py::test_quantization_aware_training_is_planned_after_one_step": 1,
    "test_usage.py::test_results_that_outlive_the_call": 1,
    "test_usage.py::test_signs_at_infinity_have_gradients_of_eager": 1,
    "test_value_shapes.py::test_masks_of_as_many_elements_keep_plans": 1,
    "test_value_shapes.py::test_masks_of_nothing_and_of_everything": 1,
    "test_value_shapes.py::test_shapes_that_activations_decide_are_refused": 5,
    "test_value_shapes.py::test_shapes_that_no_mask_decides": 1,
    "test_value_shapes.py::test_what_integers_decide": 1,
    "test_versions.py::test_bits_and_peak_are_those_of_eager_execution": 2,
    "test_versions.py::test_sums_in_place_need_no_more_room": 1,
    "test_versions.py::test_the_counterpart_makes_the_same_bits": 30,
    "test_zoo.py::test_planned_is_eager_within_the_budget": 1,
}
"""Test -> how many members `make test` runs."""

LEFT = {
    "test_advice.py": "many_adapters_that_drop_layers_by_draws",
    "test_available.py": "blocks_and_commands_leave_room_for_an_optimizer",
    "test_backward.py": """
        a_loss_of_some_outputs_is_planned_once an_output_that_was_never_differentiated
        autocast_casts_computed_parameters_as_in_eager backwards_in_another_order
        copies_of_buffers_are_within_the_budget replanning_under_the_autocast_of_the_forward
        shared_results_may_not_change_behind_the_plan
    """,
    "test_bad_input.py": "planning_inside_a_compiled_function_is_refused",
    "test_best.py": """
        a_budget_that_only_the_best_meets blocks_without_a_compiler_stay_eager
        compiled_kernels_are_taken_where_they_are_faster
    """,
    "test_blocks.py": """
        a_block_that_cannot_be_planned a_block_that_no_gradient_reaches
        a_forward_wrapped_since_stays_when_undone a_measured_step_is_under_no_limit
        a_router_in_python_around_blocks a_second_call_undoes_the_first
        a_step_starts_from_what_is_differentiated a_too_small_budget_names_the_models_need
        blocks_share_the_memory_of_the_host constraints_hold_for_further_calls
        frozen_blocks_are_another_kind_or_left further_calls_and_copies_of_blocks_page
        generators_of_python_are_restored gradients_of_before_are_the_same_bits
        larger_calls_grow_with_shares_not_with_bytes layers_are_left_out_by_chance
        names_are_kept_and_computed_again other_blocks_under_checkpoint
        planned_without_gradients_where_hooks_replace_results
        sample_and_targets_get_no_gradient the_smallest_plan_may_run_where_nothing_fits
        what_is_measured_beside_the_blocks_is_told what_is_released_is_free_in_backward
    """,
    "test_blocks_calls.py": """
        blocks_that_note_how_they_were_called found_blocks_called_twice_are_left
        transforms_inside_of_blocks what_the_forward_calls_is_found
    """,
    "test_blocks_trainers.py": """
        a_large_vocabulary_beside_blocks a_loop models_that_compute_their_loss_make_no_logits
        generation_and_checkpoints_of_planned_blocks lora_on_some_blocks
        the_cache_is_off_while_blocks_are_planned
        what_is_collected_inside_of_blocks
    """,
    "test_bounds.py": "every_schedule_solves_the_programs_at_its_peak",
    "test_budget.py": "a_loss_outside_has_room_in_the_budget",
    "test_cache.py": """
        another_budget_measures_nothing_and_solves_no_block
        entries_with_other_takeovers_are_not_damaged the_least_peak_is_looked_for_once
    """,
    "test_cli.py": """
        a_stdout_that_is_full_is_named autocast blocks_are_shown_by_kind
        compare_where_no_budget_works plot_a_model_beside_what_was_measured
        solve_without_a_budget_prints_the_curve
    """,
    "test_compare.py": """
        a_compiler_that_fails_has_a_row a_planned_module_is_compared_with_its_original
        compiled_under_a_memory_budget others_are_compared_where_eager_does_not_fit
    """,
    "test_compiled.py": """
        a_result_that_looks_otherwise_is_refused another_process_compiles_nothing
        another_process_with_an_empty_cache_plans_alike
        kernels_near_eager_round_as_eager_does kernels_of_a_head_in_parts
        no_further_from_eager_than_torch_compile
        the_gradient_of_a_maximum_reaches_its_equals
    """,
    "test_constraints.py": "cache_tells_constraints_apart",
    "test_distributed.py": "four_processes other_ways_of_two_processes",
    "test_dp_recurrence.py": "four_hundred_blocks",
    "test_dp_search.py": "answers_do_not_depend_on_earlier_questions",
    "test_dynamo.py": """
        a_graph_inside_of_a_wrapper a_share_is_one_of_each_graph
        compiled_kernels_are_planned gradients_are_handed_over_within_the_budget
        graphs_of_evaluation_are_not_missed replaced_parameters_and_frozen_ones_are_met
    """,
    "test_effects.py": """
        operators_that_nobody_knows_are_named_once
        other_dtypes_than_its_rule_says_are_refused
    """,
    "test_first_call.py": "the_default_leaves_out_the_optimizers_room",
    "test_fit.py": """
        a_single_odd_sample_has_its_own_plan eager_steps_in_backward_as_its_schedule_says
        heads_in_parts_fit_more lengths_beside_it_decide_no_row
        lengths_of_some_tensors_are_named positions_of_a_decoder_end_where_they_end
        remedies_are_options_that_hold_more the_command_says_what_the_function_does
        the_first_device_with_the_largest_batch_wins
        the_page_draws_bytes_over_batch_by_length what_a_step_does_is_in_the_sum
    """,
    "test_fit_as_on_cuda.py": "autocast_casts_as_on_cuda",
    "test_fit_compiled.py": """
        an_answer_cut_by_trials_is_not_kept eager_on_this_cpu_has_all_rows
        rows_of_compiled_kernels_are_steps_that_run too_large_to_try_is_said_by_size
    """,
    "test_fit_paging.py": "the_command_pages what_goes_to_the_host_runs_once",
    "test_fit_shards.py": """
        blocks_beyond_checkpointing_hold_fewer_samples the_command_says_the_same
        too_small_a_device_names_what_helps what_fully_shard_does_not_take_is_refused
    """,
    "test_foreign_kernels.py": "the_process_lives",
    "test_fusion.py": """
        a_plan_in_a_file_is_compiled_again files_where_some_calls_have_no_kernels
        kernels_of_recurrences_begin_past_step_one
        kernels_read_earlier_results_and_feed_later_ones kinds_do_not_depend_on_layers
        no_kernel_exceeds_what_a_compiler_takes plans_compute_what_the_module_does
        several_backward_patterns some_that_cannot_be_compiled_leave_the_others
        the_callers_settings_do_not_change_kernels training_with_gradients_that_accumulate
        what_reads_more_than_an_operator_takes
    """,
    "test_gpu_scripts.py": """
        a_limit_that_is_swallowed_strikes_again blocks_under_fully_shard_on_one_device
        figures_come_before_the_time_is_over the_link_and_paging_on_cpu
        what_hangs_has_a_row_and_others_run what_takes_too_long_is_interrupted
        whole_steps_need_what_their_rows_predict
    """,
    "test_graphs.py": "random_blocks_are_legal",
    "test_hooks.py": "a_budget_without_room_for_what_waits a_smallest_budget_where_no_plan_waits",
    "test_ilp_bound.py": """
        bound_of_transformer_blocks no_legal_schedule_beats_programs_at_moments
        no_schedule_that_is_known_is_faster the_bound_knows_of_generator_states
    """,
    "test_ilp_stages.py": """
        frees_at_the_start_of_backward_are_events transient_storages_cost_nothing
    """,
    "test_in_flight.py": """
        a_file_says_its_calls_in_flight auto_has_room_for_calls_in_flight
        calls_in_flight_beat_plans_of_one_call gradients_that_wait_count_beside_flight
        the_need_in_flight_with_other_options
    """,
    "test_in_place.py": """
        a_file_of_before_holds_as_it_was a_kernel_that_cannot_be_in_place_stays
        a_softmax_overwrites_its_scores_in_two_steps bits_and_peaks_of_kernels_in_place
        calls_of_other_sizes_write_in_place_too compilers_that_take_more_are_found_out
        networks_of_many_operators plan_files_say_what_is_taken_over
    """,
    "test_indices.py": "kernels_are_compiled_and_right where_nothing_is_found_operators_run_singly",
    "test_integrations.py": "accelerate lightning",
    "test_lengths.py": "a_chain_of_lengths_gets_no_worse",
    "test_only_loss.py": """
        an_error_names_options_that_are_enough an_explanation_names_options_that_need_less
    """,
    "test_out_of_memory.py": "autocast_is_seen_by_its_tensors in_backward_it_knows_the_models_call",
    "test_package.py": "what_an_installed_package_has_to_do",
    "test_paging.py": """
        compiled_kernels_page_too copies_out_begin_in_the_clocks_order
        random_networks_page_too
    """,
    "test_paging_options.py": "a_head_in_parts_pages_too",
    "test_paging_plans.py": """
        a_curve_has_plans_that_page a_host_may_beat_the_bound_without_one
        calls_of_other_sizes_are_planned_anew copies_are_placed_mostly_as_well_as_possible
        less_than_the_least_without_paging plans_from_files_page_what_options_allow
        plans_with_a_host_state_what_is_proven schedules_have_rows_of_copies_each_way
        storages_that_page_say_why
    """,
    "test_pareto.py": "each_point_is_the_plan_for_its_budget",
    "test_partition.py": """
        background_covers_every_rerun_of_a_block problem_digest_is_of_what_a_solver_sees
        problems_repeat_the_prices_of_their_nodes sum_of_blocks_bounds_the_whole
    """,
    "test_pebbles.py": "somewhere_no_more_than_a_pinch_is_held",
    "test_plan_file.py": "a_kind_that_the_file_lacks",
    "test_planning.py": """
        a_smallest_cut_short_counts_other_plans no_budget_reaches_less_than_the_smallest
        plans_of_one_problem_squeeze_once the_smallest_budget_is_independent_of_measurements
    """,
    "test_proof.py": """
        levels_raise_the_relaxation_never_too_far what_is_learned_holds_with_any_storages
    """,
    "test_python_state.py": "the_original_itself_is_equal",
    "test_quantized.py": "fit_keeps_classes_of_the_meta_device",
    "test_render.py": """
        planned_modules_are_drawn_as_their_plans the_curve_of_pareto_is_a_series
        the_page_says_what_is_printed
    """,
    "test_reorder.py": "some_random_graphs_need_less",
    "test_replanning.py": """
        a_shallow_copy_is_one a_share_is_under_its_own_autocast
        errors_of_captures_alone_stay_ours new_kinds_may_start_from_more
        plan_files_know_what_to_do_then unused_results_are_left_out_of_kinds
        variables_of_functions_that_are_kept_stay where_nothing_fits_at_planning
        where_nothing_fits_the_change_is_named where_nothing_fits_the_original_runs
    """,
    "test_signature.py": "what_changes_from_call_to_call_is_named",
    "test_sizes.py": """
        a_file_of_many_sizes_is_recorded_once a_loop_over_chunks_leaves_sizes_free
        a_size_that_is_constant_leaves_others_free a_slice_of_all_is_none
        arguments_that_nothing_reads_keep_no_size_shut copies_run_all_sizes
        later_sizes_search_no_smallest_plan numbers_of_numpy_are_kinds_of_call
        only_convolutions_run_at_each_size the_loss_alone_is_learned_at_once
        what_decides_by_a_count_stays_right windows_of_images_leave_sizes_open
    """,
    "test_slices.py": """
        blocks_given_one_tables_rows_are_one_kind every_slice_is_within_the_budget
        windows_of_a_sequence
    """,
    "test_starts.py": "compare_starts_where_the_plan_does",
    "test_takeover.py": "language_models_kept_whole_need_less_than_eager",
    "test_tiled.py": """
        a_large_vocabulary_needs_a_third draws_are_those_of_eager
        embedding_rows_are_added_to_the_heads_gradient files_say_in_how_many_parts
        kernels_of_parts_are_of_one_kind lengths_follow no_label_counts
        of_16_bits_only_last_bits_differ the_cache_knows_parts the_command_line
        the_curve_has_both the_faster_of_both_is_taken what_runs_again_changes_no_bit
    """,
    "test_trainers.py": """
        a_model_in_eval_mode_is_said a_planned_whole_in_the_forward_of_trl
        a_requested_cache_is_refused_and_left_on attributes_never_read_need_no_other_plan
        check_and_other_settings_of_a_default_model logits_that_may_go_are_advised_of
    """,
    "test_untouched.py": "what_a_loss_writes_is_put_back",
    "test_usage.py": """
        a_check_amid_backward_does_not_disturb
        a_check_compares_parameters_and_inputs_afterwards
        a_check_under_autocast_goes_backward_without
        a_module_changed_before_its_backward_is_planned a_plan_checked_inside_a_checkpoint
        autocast_without_its_cache_of_weights
        cached_parametrizations check_refuses_what_only_the_plan_freezes
        checkpoints_around_planned_modules_and_other_gradients
        checkpoints_keep_the_same_of_planned_modules compile_leaves_a_planned_module_alone
        dtype_changed_after_planning gradients_of_inputs_count_to_the_end
        no_hook_sees_the_gradients_of_a_check operators_of_other_libraries
        planned_modules_are_replanned_from_their_originals
        plans_run_under_compilation_of_the_module quantization_aware_training
        results_that_are_inputs tracing_sees_the_original
    """,
    "test_value_shapes.py": "a_refusal_that_is_caught_remains_one the_way_out_of_experts_in_a_loop",
    "test_zoo.py": "kernels_compute_alike_where_nothing_runs_again",
}
"""File -> tests that `make sweep` alone runs: `make test` runs others of their mechanism."""

RUN |= {f"{file}::test_{name}": 0 for file, names in LEFT.items() for name in names.split()}


def left_to_sweeps(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the members that `make test` leaves to `make sweep`."""
    families = collections.defaultdict(list)
    for item in items:
        families[item.nodeid.removeprefix("tests/").partition("[")[0]].append(item)
    left: list[pytest.Item] = []
    for name, count in RUN.items():
        members = families[name]
        run = {i * (len(members) - 1) // max(count - 1, 1) for i in range(count)}
        left += [item for i, item in enumerate(members) if i not in run]
    return left
