"""Every metric of a run, with unit and meaning; as a Markdown page: `python -m roll_flash.monitor.metric_table`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass

_INTRODUCTION = """\
# Every metric of a run

A run writes its metrics to `metrics.jsonl` (one JSON line per step, and one per evaluation and checkpoint; `step` and
`time`, a Unix time in seconds, are in each) and to TensorBoard. `on_step` of the Python API gets the same names, and so
do [other systems](exporters.md).

A name is `PART/WHAT`; names without a part are of the step itself: its episodes, its tokens, and the learner's update.
A name ends with its unit where it has one (`_s`, `_mib`). A count is a number of things; *so far* means since the start
of the process that runs (a resumed run counts from 0, but `books/*` of what it takes over). A share is between 0 and 1.
`{...}` in a name stands for any text, `{n}` for a number. A value that is not known, NaN or infinite is `null`.

Begin with `reward`, `success` and `eval/success` (does it learn?), `staleness_mean`, `mismatch_gap_max` and
`effective_sample_size` (is the training data what the learner takes it for?), `idle/learner` and `idle/servers` (who
waits for whom?), `books/failed_{cause}` and `groups_without_signal` (what is lost?).

`python -m roll_flash.monitor.metric_table > docs/metrics.md` makes this page from `roll_flash/monitor/metric_table.py`.
"""

SHARE, COUNT, SO_FAR, SECONDS = "share", "count", "count so far", "seconds"
NATS, RATIO, TOKENS = "nats", "ratio", "tokens"


@dataclass(frozen=True, slots=True)
class Metric:
    """`name` may hold placeholders: `{n}` for a number, others for any text."""

    name: str
    unit: str
    meaning: str

    def describes(self, name: str) -> bool:
        parts = re.split(r"(\{\w+\})", self.name)
        pattern = "".join(r"\d+" if part == "{n}" else ".+" if part[:1] == "{" else re.escape(part) for part in parts)
        return re.fullmatch(pattern, name) is not None


def _histogram(name: str, unit: str, meaning: str) -> list[Metric]:
    return [
        Metric(f"{name}.mean", unit, f"{meaning}: mean so far"),
        Metric(f"{name}.p50", unit, "median, from a histogram"),
        Metric(f"{name}.p95", unit, "95th percentile, from a histogram"),
        Metric(f"{name}.max", unit, "largest"),
    ]


TABLE: dict[str, list[Metric]] = {
    "The episodes of the step": [
        Metric("reward", "reward", "mean reward of the trained episodes, after all stages"),
        Metric("shaped_reward", "reward", "the same after the learner's penalties: what advantages are computed of"),
        Metric("overlong_penalty", "reward", "mean penalty for length (`learner.overlong`)"),
        Metric("success", SHARE, "episodes that succeeded, of those that say so or that the run ended"),
        Metric("rewards/{name}", "reward", "mean of one of several rewards, before they are added up"),
        Metric("roles/{name}/reward", "reward", "mean reward of a role (self-play), of the episodes in which it spoke"),
        Metric("roles/{name}/turns_mean", COUNT, "its turns in such an episode"),
        Metric("reward_min", "reward", "lowest reward of a trained episode"),
        Metric("reward_max", "reward", "highest reward of a trained episode"),
        Metric("reward_std_in_group", "reward", "standard deviation of the rewards within a group, mean over groups"),
        Metric("groups_without_signal", COUNT, "groups whose replicas all have the same advantage: nothing is learned"),
        Metric("episodes", COUNT, "trained episodes"),
        Metric("groups", COUNT, "trained groups"),
        Metric("trajectories", COUNT, "trajectories that the learner got"),
        Metric("sequences", COUNT, "episodes that can be trained: the divisor of `loss_normalization: sequences`"),
        Metric("branches", COUNT, "samples beyond the first of an episode, of agents that rewrite their history"),
        Metric("turns_mean", COUNT, "turns per episode"),
        Metric("tokens_mean", TOKENS, "tokens per episode, prompts included"),
        Metric("tokens_per_s", "tokens/s", "tokens of the trained episodes per second of the step, prompts included"),
        Metric("step_s", SECONDS, "length of the step, from one report to the next"),
        Metric("idle/learner", SHARE, "of the step in which the learner waited for episodes"),
        Metric("idle/servers", SHARE, "of the step in which no episode ran"),
    ],
    "Staleness and the difference between sampler and learner": [
        Metric("staleness_mean", "versions", "mean age of the sampled tokens: versions between sampling and training"),
        Metric("staleness_max", "versions", "age of the oldest token"),
        Metric("staleness_{n}", SHARE, "tokens of this age"),
        Metric("staleness_{n}_or_more", SHARE, "tokens of this age or older"),
        Metric("async_ratio", "versions", "largest staleness allowed (`scheduler.async_ratio`)"),
        Metric("kl_k1", NATS, "KL(sampler || learner), estimated as the mean of -log rho"),
        Metric("kl_k3", NATS, "the same as the mean of rho - 1 - log rho, which is never negative"),
        Metric("kl_k3/age_{age}", NATS, "`kl_k3` of the tokens of one age"),
        Metric("lag_kl_k3", NATS, "`kl_k3` of the other tokens beyond that of fresh ones: what staleness adds"),
        Metric(
            "mismatch_kl_k3",
            NATS,
            "`kl_k3` of fresh tokens: age 0, no update since their turn began",
        ),
        Metric("mismatch_gap_mean", NATS, "mean difference of log-probabilities of fresh tokens"),
        Metric("mismatch_gap_max", NATS, "largest one"),
        Metric("logprob_gap_max", NATS, "largest difference of log-probabilities of any token"),
        Metric("not_finite_tokens", TOKENS, "tokens that these figures leave out: the learner gives NaN or infinity"),
        Metric("effective_sample_size", SHARE, "of the tokens, after importance weighting (Kish); low: too off-policy"),
        Metric("rho_mean", RATIO, "importance ratio rho = learner / sampler: mean over tokens"),
        Metric("rho_max", RATIO, "its maximum"),
        Metric("rho_p{n}", RATIO, "its percentile"),
        Metric("correction_weight", RATIO, "mean importance weight after truncation"),
        Metric("correction_fraction", SHARE, "tokens whose weight was truncated or masked"),
        Metric("correction_fraction/age_{age}", SHARE, "the same for tokens of one age"),
        Metric(
            "rejected_fraction", SHARE, "tokens of sequences beyond `learner.loss.sequence_floor` and `sequence_cap`"
        ),
        Metric("rejected_fraction/age_{age}", SHARE, "the same for tokens of one age"),
        Metric("second_moment", "nats²", "mean of (log rho)² where a token moves further away, over the step"),
        Metric("second_moment_kept", "nats²", "the same of the tokens that `learner.loss.second_moment` keeps"),
        Metric("left_out_fraction", SHARE, "tokens that it leaves out of the loss"),
        Metric("clip_fraction", SHARE, "tokens whose ratio the loss clipped"),
        Metric("clip_fraction/age_{age}", SHARE, "the same for tokens of one age"),
    ],
    "The learner's update": [
        Metric("loss", "", "loss of the step; its size means little in policy-gradient training"),
        Metric("grad_norm", "", "norm of the gradient before clipping; the largest of several optimizer steps"),
        Metric("learning_rate", "", "learning rate of the step"),
        Metric("behavior_entropy", NATS, "entropy of the sampler: mean of minus the log-probability of its tokens"),
        Metric("entropy", NATS, "mean entropy of the policy at the sampled tokens"),
        Metric("entropy_bonus", "", "weight of the entropy in this step (`learner.adaptive_entropy`)"),
        Metric("kl_reference", NATS, "mean KL estimate to the reference model (`learner.kl`), per token"),
        Metric("distill/reverse_kl", NATS, "KL(sampler || teacher): mean of log mu - log pi_teacher"),
        Metric("distill/limited_fraction", SHARE, "sampled tokens whose log-ratio to the teacher is limited, to 20"),
        Metric("router_aux_loss", "", "load-balancing loss of the experts, per token"),
        Metric("value_loss", "", "clipped loss of the critic's values, mean over the sampled tokens"),
        Metric("value_explained_variance", "", "1 - var(return - value) / var(return); 1 is perfect, 0 a constant"),
        Metric("value_clip_fraction", SHARE, "tokens whose value `learner.critic.clip` held back"),
        Metric("value_mean", "reward", "mean value at the sampled tokens, at the start of the step"),
        Metric("return_mean", "reward", "mean of what the values should have been"),
        Metric("value_grad_norm", "", "norm of the gradient of the critic's weights before clipping, as `grad_norm`"),
        Metric("skipped", COUNT, "optimizer steps skipped because the gradient was not finite"),
        Metric("optimizer_steps", COUNT, "optimizer steps that were taken"),
        Metric("policy_tokens", TOKENS, "sampled tokens"),
        Metric("computed_policy_tokens", TOKENS, "sampled tokens that the learner computed: those with a signal"),
        Metric("computed_tokens", TOKENS, "all tokens that it computed, shared prefixes once"),
        Metric("shared_tokens_saved", TOKENS, "tokens that sharing prefixes saved"),
        Metric("rows", COUNT, "packed rows"),
        Metric("tokens_without_logprob", TOKENS, "sampled tokens without a log-probability, which are not trained on"),
        Metric("dropped_{fault}", COUNT, "trajectories that the learner refused, by reason"),
        Metric("overlong_filtered", COUNT, "trajectories left out because they were cut (`learner.overlong.filter`)"),
        Metric("prox_s", SECONDS, "extra forward passes at the start of a step (with `minibatches`, M2PO, `gae`)"),
        Metric("reference_s", SECONDS, "extra forward passes of the reference (`learner.kl.in_reward`)"),
        Metric("forward_backward_s", SECONDS, "forward and backward passes"),
        Metric("optimizer_s", SECONDS, "optimizer steps"),
        Metric("staging_s", SECONDS, "copy of the weights before the step, for the servers"),
    ],
    "New weights": [
        Metric("weights/total_s", SECONDS, "until all servers had the weights, one after another"),
        Metric("weights/paused_s", SECONDS, "without generation on one server because of that, the longest"),
        Metric("weights/mib", "MiB", "size of what was sent"),
        Metric("weights/published_share", SHARE, "of the model's size that was sent"),
        Metric("weights/parity", NATS, "difference of log-probabilities of servers and learner: 99th percentile"),
        Metric("weights/parity_mean", NATS, "its mean"),
        Metric("weights/parity_max", NATS, "its maximum"),
    ],
    "Books: every trajectory and episode by its result": [
        Metric("books/produced", SO_FAR, "trajectories; always trained + dropped + waiting"),
        Metric("books/trained", SO_FAR, "trajectories that were trained"),
        Metric("books/waiting", COUNT, "trajectories that wait to be trained"),
        Metric(
            "books/dropped_{reason}",
            SO_FAR,
            "trajectories dropped: `stale`, `surplus`, `no_signal`, `too_few_trajectories` (others failed)",
        ),
        Metric("books/failed_{cause}", SO_FAR, "episodes without a trajectory, by cause"),
        Metric("books/cancelled", SO_FAR, "episodes that were cancelled: no step could have trained them"),
        Metric("books/groups_requeued", SO_FAR, "groups that were played again"),
        Metric("books/groups_given_up", SO_FAR, "groups requeued too often"),
        Metric("books/groups_unfiltered", SO_FAR, "groups without signal trained although they are filtered"),
        Metric("moved_episodes", SO_FAR, "episodes that went on after their worker, or the run, was killed"),
        Metric("moved_turns", SO_FAR, "finished turns that these did not sample again"),
    ],
    "Tasks and selection bias": [
        Metric("tasks/{name}", "", "what the task source reports, such as success and share of each level"),
        Metric("bias/length_ratio_{bound}", RATIO, "mean length of trained episodes / of all that were started"),
        Metric("bias/length_distance_{bound}", SHARE, "largest distance of the two distributions (Kolmogorov-Smirnov)"),
        Metric("bias/latency_ratio_{bound}", RATIO, "mean duration of trained episodes / of all that were started"),
        Metric("bias/latency_distance_{bound}", SHARE, "largest distance of the two distributions"),
        Metric("bias/task_distance", SHARE, "total variation distance of the levels of trained and of started tasks"),
        Metric("bias/unfinished", SHARE, "started episodes that never ended; bounds `_low` and `_high` allow for them"),
        Metric("bias/{level}/trained_share", SHARE, "episodes of one environment or level that were trained"),
        Metric("bias/{level}/unfinished", SHARE, "of its episodes"),
        Metric("bias/{level}/latency_ratio_{bound}", RATIO, "of its episodes"),
    ],
    "Requests to the servers, as the workers see them": [
        Metric("inference/requests", SO_FAR, "requests"),
        Metric("inference/asked_again", SO_FAR, "requests continued elsewhere: the server died, hung or aborted them"),
        Metric("inference/aborted", SO_FAR, "requests that a server aborted"),
        Metric("inference/tokens_kept", "tokens so far", "tokens that these did not sample again"),
        Metric("inference/bad_answers", SO_FAR, "invalid answers"),
        Metric("inference/removed", SO_FAR, "times that a client stopped using a server"),
        Metric("inference/returned", SO_FAR, "times that it used one again"),
        Metric("inference/hung", SO_FAR, "removals because of a failed health check"),
        Metric("inference/outstanding_tokens_{n}", TOKENS, "tokens of requests that server {n} has now"),
        Metric("inference/servers_out", COUNT, "servers that clients do not use now, summed over workers"),
        Metric("inference/spill_overs", SO_FAR, "requests sent to another server than the one with their prefix"),
        Metric("inference/queue_waiting", COUNT, "requests that wait for room on a server now"),
        Metric("inference/queue_waits", SO_FAR, "requests that had to wait"),
        Metric("inference/queue_wait_s", SECONDS, "time that they waited so far, summed"),
        Metric("inference/queue_longest_wait_s", SECONDS, "longest wait so far"),
        Metric("inference/gateway_{name}", SO_FAR, "of the agents' gateway: sessions, calls, refusals, forks"),
    ],
    "Servers": [
        Metric("inference/server_deaths", SO_FAR, "servers that died or were killed because they hung"),
        Metric("inference/server_hung", SO_FAR, "servers that hung"),
        Metric("inference/server_lost", SO_FAR, "servers whose node was lost"),
        Metric("inference/server_up_{n}", "0 or 1", "0 while server {n} is started again or its node is lost"),
        Metric("inference/server_requests_running_{n}", COUNT, "requests that it samples now"),
        Metric("inference/server_requests_waiting_{n}", COUNT, "requests in its own queue now"),
        Metric("inference/server_kv_cache_usage_{n}", SHARE, "of its cache of keys and values in use now"),
        Metric("inference/server_kv_cache_tokens_{n}", TOKENS, "size of that cache"),
        Metric("inference/server_preemptions_{n}", SO_FAR, "requests interrupted because the cache was full"),
        Metric("inference/server_prefix_cache_queries_{n}", "tokens so far", "prompt tokens looked up"),
        Metric("inference/server_prefix_cache_hits_{n}", "tokens so far", "prompt tokens found"),
    ],
    "Sandboxes": [
        Metric("sandbox/ready", COUNT, "started and not leased now"),
        Metric("sandbox/starting", COUNT, "starting now"),
        Metric("sandbox/waiting", COUNT, "leases that wait for a sandbox now"),
        Metric("sandbox/leased", COUNT, "in use by an episode now"),
        Metric("sandbox/closing", COUNT, "closing now"),
        Metric("sandbox/started", SO_FAR, "started"),
        Metric("sandbox/start_failures", SO_FAR, "that did not start"),
        Metric("sandbox/leases", SO_FAR, "uses by an episode"),
        Metric("sandbox/leases_expired", SO_FAR, "leases that ended because of their time limit"),
        Metric("sandbox/reused", SO_FAR, "leased again after a reset"),
        Metric("sandbox/not_reused", SO_FAR, "closed because their reset failed"),
        Metric("sandbox/reaped", SO_FAR, "leftovers of dead controllers, and unused builds, that were removed"),
        Metric("sandbox/sweep_failures", SO_FAR, "failed searches for leftovers"),
        Metric("sandbox/died_while_ready", SO_FAR, "that died before they were used"),
        Metric("sandbox/died_in_lease", SO_FAR, "that died while they were used"),
        Metric("sandbox/close_failures", SO_FAR, "that could not be closed"),
        Metric("sandbox/commands", SO_FAR, "commands"),
        Metric("sandbox/timeouts", SO_FAR, "commands that took too long"),
        Metric("sandbox/truncations", SO_FAR, "commands whose output was cut"),
        Metric("sandbox/oom_kills", SO_FAR, "processes killed for lack of memory"),
        Metric("sandbox/cpu_s", SECONDS, "processor time so far"),
        *_histogram("sandbox/start_s", SECONDS, "to start one"),
        *_histogram("sandbox/wait_s", SECONDS, "from the request for a lease to its start"),
        *_histogram("sandbox/lease_s", SECONDS, "length of a lease"),
        *_histogram("sandbox/exec_s", SECONDS, "of a command"),
        *_histogram("sandbox/peak_memory_mib", "MiB", "largest memory of a lease"),
        *_histogram("sandbox/cpu_of_lease_s", SECONDS, "processor time of a lease"),
    ],
    "The stream and its stages": [
        Metric("stream/produced", SO_FAR, "trajectories that entered the stream"),
        Metric("stream/consumed", SO_FAR, "trajectories that were trained"),
        Metric("stream/dropped_{reason}", SO_FAR, "trajectories dropped, by reason"),
        Metric("stream/waiting", COUNT, "trajectories in the stream now"),
        Metric("stream/balanced", "0 or 1", "1 if produced = consumed + dropped + waiting"),
        Metric("stream/ready_{stage}", COUNT, "trajectories that a stage could take now"),
        Metric("stages/{stage}/rows", SO_FAR, "trajectories that it scored"),
        Metric("stages/{stage}/batches", SO_FAR, "calls"),
        Metric("stages/{stage}/retries", SO_FAR, "calls that were repeated"),
        Metric("stages/{stage}/failed_rows", SO_FAR, "trajectories that it could not score"),
        Metric("stages/{stage}/seconds", SECONDS, "time in calls so far, summed"),
        Metric("stages/{stage}/score_mean", "score", "mean score since the step before"),
    ],
    "Evaluations, checkpoints, warm start": [
        Metric("eval/success", SHARE, "held-out episodes that succeeded"),
        Metric("eval/success_low", SHARE, "lower bound of its 95 % interval"),
        Metric("eval/success_high", SHARE, "upper bound"),
        Metric("eval/reward", "reward", "mean reward of held-out episodes"),
        Metric("eval/failed", COUNT, "episodes without a score"),
        Metric("eval/trained_on", COUNT, "evaluated tasks that were also trained on"),
        Metric("eval/oldest_version", "version", "oldest weights that sampled a token of it"),
        Metric("eval/newest_version", "version", "newest weights"),
        Metric("eval/seconds", SECONDS, "length of the evaluation"),
        Metric("eval/skipped", SO_FAR, "evaluations left out because the one before was not over"),
        Metric("eval/given_up", SO_FAR, "evaluations that failed"),
        Metric("{env}/eval/{name}", "", "the same of another environment than the first"),
        Metric("checkpoint/waited_s", SECONDS, "time in which training waited for a checkpoint's copy"),
        Metric("checkpoint/written_s", SECONDS, "to write the newest checkpoint, beside training"),
        Metric("warm_start/demonstrations", COUNT, "demonstrations"),
        Metric("warm_start/too_long", COUNT, "demonstrations drawn and left out: more tokens than `model.max_length`"),
        Metric("warm_start/first_loss", NATS, "loss per token of the first supervised step"),
        Metric("warm_start/last_loss", NATS, "of the last one"),
        Metric("metrics/not_finite", COUNT, "values of this line that were NaN or infinite"),
        Metric("export/dropped_{system}", SO_FAR, "lines that a system of `monitor.export` did not take"),
    ],
    "The machine of the driver": [
        Metric("machine/disk_free_gib", "GiB", "free space of the disk of the run folder"),
        Metric(
            "machine/memory_available_gib",
            "GiB",
            "memory that is free before the machine swaps or a control group is full",
        ),
        Metric("machine/episodes_gib", "GiB", "episodes and journal of the run on the disk, compressed or not"),
        Metric("machine/episodes_removed_steps", SO_FAR, "steps whose episodes were removed (`monitor.episodes_gib`)"),
    ],
}


def find_metric(name: str) -> Metric | None:
    """Return the entry that describes a metric of a run; None for an unknown one."""
    return next((metric for metrics in TABLE.values() for metric in metrics if metric.describes(name)), None)


def page() -> str:
    """Return the Markdown page."""
    return "\n".join([_INTRODUCTION, *_sections()])


def _sections() -> Iterator[str]:
    for title, metrics in TABLE.items():
        yield f"## {title}\n\n| metric | unit | meaning |\n|---|---|---|"
        for metric in metrics:
            yield f"| `{metric.name}` | {metric.unit} | {metric.meaning.replace('|', chr(92) + '|')} |"
        yield ""


if __name__ == "__main__":
    sys.stdout.write(page())
