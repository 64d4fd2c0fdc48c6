"""What each number in a run's log means: the table of the docs and of the report.

The names are those of metrics.jsonl; a tracker shows the same ones below `train/`, and `eval/` as it is. A `*` stands
for one part of a name.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

MEANINGS = {
    "reward": "The weighted reward, which GRPO trains on: the reward functions' values times --reward_weights, summed.",
    "reward_std": "Spread of the weighted reward over the episodes of the batch; near 0 there is nothing to learn.",
    "frac_reward_zero_std": "Share of groups of equal reward; 0 or 1, for the whole batch, with --scale_rewards batch.",
    "rewards/*/mean": "Mean of one reward function before its weight; all but operational lie between 0 and 1.",
    "rewards/*/std": "Spread of one reward function before its weight.",
    "reward_weights/*": "The weight of one reward in this step; logged with --reward_weighting adaptive.",
    "loss": "GRPO's loss; not a progress indicator: it may rise or fall in a healthy run.",
    "policy_loss": "The loss without the entropy bonus; logged when --entropy_coef is set.",
    "aux_loss": "The load-balancing loss of a mixture of experts.",
    "grad_norm": "Norm of the gradient before clipping (--max_grad_norm); spikes and NaN come before a collapse.",
    "gradient_share/correctness": "Share of abs(advantage) x trained tokens in groups with right and wrong episodes.",
    "learning_rate": "The learning rate of this step.",
    "kl": "Mean KL divergence of the policy from the reference model, per token; logged when --beta is above 0.",
    "entropy": "Mean entropy of the policy on its own tokens, in nats; falling to 0 means it no longer explores.",
    "entropy_coef": "The weight of the entropy bonus; logged when there is one.",
    "clip_ratio/low_mean": "Share of tokens whose probability fell below the clipping range; 0 in the first update.",
    "clip_ratio/high_mean": "Share of tokens whose probability rose above the clipping range; 0 in the first update.",
    "clip_ratio/region_mean": "Share of tokens clipped at either end.",
    "clip_ratio/low_min": "The smallest share of tokens clipped at the low end in any one episode.",
    "clip_ratio/high_max": "The largest share of tokens clipped at the high end in any one episode.",
    "cispo_clip_ratio": "Share of tokens whose weight was capped; logged with --loss_type cispo.",
    "vespo/phi_seq_mean": "Mean weight of a sequence; logged with --loss_type vespo.",
    "completions/mean_length": "Mean number of tokens that the policy wrote in an episode, over all its turns.",
    "completions/min_length": "The shortest episode of the batch, in the policy's own tokens.",
    "completions/max_length": "The longest episode of the batch, in the policy's own tokens.",
    "completions/clipped_ratio": "Share of episodes that end without the end-of-turn token: they were cut off.",
    "completions/mean_terminated_length": "Mean length of the episodes that were not cut off.",
    "completions/min_terminated_length": "The shortest of the episodes that were not cut off.",
    "completions/max_terminated_length": "The longest of the episodes that were not cut off.",
    "sampling/sampling_logp_difference/mean": "Mean gap between the engine's and the trainer's logprob of a token.",
    "sampling/sampling_logp_difference/max": "The largest such gap in the batch.",
    "sampling/importance_sampling_ratio/min": "The smallest trainer-to-engine probability ratio; 1 is exact.",
    "sampling/importance_sampling_ratio/mean": "The mean of that ratio; it stays near 1 while both hold one policy.",
    "sampling/importance_sampling_ratio/max": "The largest ratio, as capped by the importance-sampling correction.",
    "rollout/success_rate": "Share of training episodes whose ANSWER was right, failed ones left out; sampled.",
    "rollout/reward": "Mean reward of an episode, as the environment counts it; evaluations show the same.",
    "rollout/steps": "Mean number of actions in an episode.",
    "rollout/out_of_budget": "Share of episodes that used up --step_budget without an ANSWER.",
    "rollout/out_of_tokens": "Share of episodes that used up --max_completion_length without an ANSWER.",
    "rollout/failed": "Errored rollouts: the infrastructure failed; they are masked and count nowhere.",
    "rollout/truncated": "Episodes that lost their oldest turns because the context was full.",
    "rollout/trained_tokens": "Tokens of the policy in the batch: those that the loss is about.",
    "rollout/trained_token_share": "Share of the policy's tokens that are trained; those of dropped turns are not.",
    "rollout/no_signal": "Share of zero-variance groups: all right or all wrong, without a learning signal.",
    "rollout/exploration_entropy": "Entropy of a group's actions before ANSWER: 0 all alike, 1 no two alike.",
    "rollout/replaced": "Groups without signal that were replaced, or not (--dynamic_sampling, --guided_starts).",
    "rollout/guided_share": "Share of the trained episodes that began with given steps (--guided_starts).",
    "rollout/guided_success": "Success of the episodes with given steps; those count in no other success rate.",
    "rollout/given_steps": "Mean number of steps that such an episode was given; it falls as they succeed.",
    "rollout/staleness/mean": "Mean updates between a turn's weights and those that it is trained on (--staleness).",
    "rollout/staleness/max": "The largest such number; never more than --staleness.",
    "rollout/seconds": "Seconds that one batch of episodes took, on the slowest rank.",
    "rollout/idle_seconds": "Seconds that the batch lay ready before the trainer asked for it: training is slower.",
    "rollout/episodes_per_second": "Episodes per second over all ranks while they were played.",
    "engine/waiting": "Requests that an inference server let wait, on average over the looks at it; see --use_vllm.",
    "engine/kv_cache": "The largest share of a server's KV cache that running requests held; at 1 it is full.",
    "engine/preemptions": "Requests that servers began, preempted because the KV cache was full, and recomputed.",
    "engine/weight_sync_gap": "Root mean square of servers' logprobs less the trainer's after a push, in nats.",
    "engine/prefix_hits": "Share of prompt tokens found in the prefix cache; low when too many episodes share it.",
    "time/rollout": "Seconds of a step that the trainer waited for episodes.",
    "time/queue": "Of these, what episodes waited for a place in flight: more --max_concurrency.",
    "time/generation": "Of these, what episodes waited for tokens: more or faster inference servers, shorter turns.",
    "time/environment": "Of these, what episodes waited for sessions, resets and steps: more environment servers.",
    "time/judging": "Of these, what episodes waited for the step that is judged, ANSWER.",
    "time/client": "Of these, the rollout client's own work: prompts, token ids, parsing.",
    "time/push": "Seconds of a step that the trainer waited for the weights to reach the engine.",
    "time/training": "Seconds of the rest of the step: scoring, loss, gradients, optimizer.",
    "time/other": "Seconds between the step before and this one: evaluations, checkpoints, logs.",
    "eval/success_rate": "Share of the evaluation questions answered right, playing greedily.",
    "eval/success_low": "Low end of its 95% interval, with the database as the unit that was sampled.",
    "eval/success_high": "High end of that interval.",
    "eval/reward": "Mean reward of an evaluation episode, as the environment counts it.",
    "eval/steps": "Mean number of actions in an evaluation episode.",
    "eval/parse_rate": "Share of turns that were in the action format.",
    "eval/episodes": "Evaluation episodes that were judged.",
    "eval/failed": "Errored evaluation episodes; they are in no rate.",
    "step_time": "Seconds that one training step took, rollouts included and evaluations not.",
    "num_tokens": "Tokens of prompts and completions so far.",
    "epoch": "Passes through the training questions so far.",
}
"""Metrics in the order of a table, with one sentence each."""


def meaning(name: str) -> str:
    """What a metric means; nothing for one that is not in the table."""
    return next((text for pattern, text in MEANINGS.items() if fnmatchcase(name, pattern)), "")


def in_order(names: Iterable[str]) -> list[str]:
    """Metrics as the table has them, those that it does not have last."""
    patterns = list(MEANINGS)

    def place(name: str) -> int:
        return next((i for i, pattern in enumerate(patterns) if fnmatchcase(name, pattern)), len(patterns))

    return sorted(names, key=lambda name: (place(name), name))
