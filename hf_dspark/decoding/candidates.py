"""The stock engine: transformers' own assisted loop (batch 1), fed by the same `Proposer` as ours.

For people who build on transformers' `CandidateGenerator` API, and as a check of our loop. What that loop lacks stays
lacking: one row, criteria other than EOS and length tested once per round, no continued caches.
"""

import time
from threading import RLock

import torch
import transformers
from packaging.version import Version
from transformers import LogitsProcessorList
from transformers.generation.candidate_generator import CandidateGenerator

from hf_dspark.drafting.proposer import Context, Proposer, Sampling
from hf_dspark.modeling import SpeculationConfig
from hf_dspark.scheduling.headless import survival_estimate
from hf_dspark.scheduling.policy import StaticGate
from hf_dspark.verification.chain import Noise
from hf_dspark.verification.probabilities import KeyedNoise, Scorer

from .outputs import SpeculationStats, SpeculativeOutput
from .target import FeatureTap

_LOCK = RLock()


class DrafterCandidateGenerator(CandidateGenerator):
    """Candidates from one of our drafters.

    Args:
        drafter: bound to the target. tap ([`FeatureTap`]): active on the target. input_ids ([1, T]): the prompt.
        speculation: the knobs; `generation_config` and `logits_processor` as `generate` prepared them.
        pads (`int`): left pad columns of the prompt.
    """

    requires_model_outputs = True
    model_kwargs_overrides: dict = {}

    def __init__(self, drafter, tap: FeatureTap, speculation, generation_config, logits_processor, input_ids, pads=0):
        self.drafter, self.tap, self.speculation = drafter, tap, speculation
        self.config, self.pads = generation_config, pads
        gate = None if speculation.loop_gate is None else StaticGate(speculation.loop_gate)
        first = torch.zeros(1, dtype=torch.long)
        self.proposer = Proposer(drafter, speculation, first, gate=gate, estimate=survival_estimate(drafter))
        self.scorer = Scorer(logits_processor, [input_ids[0]], [input_ids[0, pads:]], lazy=False)
        self.seed = torch.randint(2**62, ()).item() if speculation.seed is None else speculation.seed
        self.prompt, self.draft, self.stats = input_ids.shape[1], None, SpeculationStats.empty(1)
        eos = getattr(generation_config, "_eos_token_tensor", None)
        self.stop_ids = frozenset() if eos is None else frozenset(eos.flatten().tolist())

    def get_candidates(self, input_ids, model_outputs=None, is_first_iteration=True, n_last_matches=0, **kwargs):
        """`input_ids` [1, n] and, behind them, L drafts; with them log q [1, L, V] if they were sampled from q."""
        if is_first_iteration or model_outputs is None:
            return input_ids, None
        began = time.perf_counter()
        self._observe(input_ids[:, self.pads :], int(n_last_matches))
        draft = self.draft = self.proposer.propose(self._context(input_ids[:, self.pads :]))
        self.stats.draft_seconds += time.perf_counter() - began
        count = draft.lengths[0]
        tokens = draft.tokens[:, :count].to(input_ids.device)
        logits = draft.q[:, :count].log() if draft.q is not None and count else None
        return torch.cat([input_ids, tokens], 1), logits

    def _observe(self, ids: torch.Tensor, matches: int) -> None:
        features = self.tap.features(self.drafter.device)
        if self.draft is None:
            features, fed = features[:, self.pads :], ids.shape[1] - 1
        else:
            fed = matches + 1
        features = features[:, :fed]
        self.proposer.observe(features, ids[:, ids.shape[1] - fed :], torch.tensor([fed]))

    def _context(self, ids: torch.Tensor) -> Context:
        n, generated = ids.shape[1], ids.shape[1] + self.pads - self.prompt
        room = max(self.config.max_length - n - self.pads - 1, 0)
        noise = Noise(self.seed, [0], [generated]) if self.config.do_sample else None
        return Context([0], ids[:, -1], ids, [n], [room], [Sampling([0], [0], self.scorer, noise, self.stop_ids)])

    def update_candidate_strategy(self, input_ids, scores, num_matches) -> None:
        if self.draft is not None:
            matches = int(num_matches)
            self.stats.add(0, matches + 1, self.draft.lengths[0], matches, self.draft.stages[0])


def check_stock(speculation: SpeculationConfig, rows: int, given_cache, do_sample: bool) -> None:
    """Refuse what transformers' loop can't do.

    Raises:
        ValueError: naming the limit and the way out.
    """
    way_out = "set engine='own' (the default)."
    if Version(transformers.__version__) < Version("5.18"):
        raise ValueError(
            f"engine='stock' with transformers {transformers.__version__}: its assisted loop generates past an "
            f"accepted end-of-sequence token before 5.18. Upgrade transformers, or {way_out}"
        )
    if rows > 1:
        raise ValueError(
            f"engine='stock' was asked for {rows} rows, and transformers' assisted loop takes one: {way_out}"
        )
    if given_cache is not None and given_cache.get_seq_length() > 0:
        raise ValueError(
            f"engine='stock' was given a filled cache, which its loop feeds the whole sequence to again: {way_out}"
        )
    if speculation.verification == "block" and do_sample:
        raise ValueError(f"engine='stock' has no block verification: set verification='ratio' or 'match', or {way_out}")
    if speculation.copy is not None:
        raise ValueError(
            f"engine='stock' asks the drafter alone and copies nothing, and copy={speculation.copy!r} was set: set "
            f"copy=None, or {way_out} Without a drafter, transformers' own copies are "
            "generate(prompt_lookup_num_tokens=...)."
        )
    if speculation.scheduler is not None or speculation.loop_gate == "auto":
        raise ValueError(
            f"engine='stock' measures nothing, so scheduler and loop_gate can't be 'auto': set them, or {way_out}"
        )


def stock_generate(target, drafter, speculation, original, input_ids, kwargs, mask):
    """Run transformers' `_assisted_decoding` (`original`) with our candidate generator in place of its own."""
    config = kwargs["generation_config"]
    check_stock(speculation, input_ids.shape[0], kwargs.get("cache", kwargs.get("past_key_values")), config.do_sample)
    pads = int(mask[0].argmax())
    if not bool(mask[0, pads:].all()):
        raise ValueError(
            "engine='stock' needs a prompt without pads inside or behind it: pad on the left, or set engine='own'."
        )
    text = target.config.get_text_config()
    whole = text.num_hidden_layers - (getattr(text, "num_kv_shared_layers", 0) or 0)
    if max(drafter.config.target_layer_ids, default=-1) >= whole < text.num_hidden_layers:
        raise ValueError(
            f"engine='stock' was asked for, whose prefill computes the layers of {type(target).__name__} from {whole} "
            f"on for the last token alone; this drafter reads target_layer_ids={drafter.config.target_layer_ids}: set "
            "engine='own'."
        )
    if config.do_sample and speculation.verification == "match":
        # Their loop samples with torch's generator; keyed noise reaches it as a processor, with sampling off.
        seed = torch.randint(2**62, ()).item() if speculation.seed is None else speculation.seed
        noise = KeyedNoise(seed, input_ids.shape[1])
        kwargs["logits_processor"], config.do_sample = LogitsProcessorList([*kwargs["logits_processor"], noise]), False
    with FeatureTap(target, drafter.config.target_layer_ids) as tap:
        generator = DrafterCandidateGenerator(
            drafter, tap, speculation, config, kwargs["logits_processor"], input_ids, pads
        )
        began = time.perf_counter()
        with _LOCK:  # their loop asks the target for its generator, which threads that share the target share
            target._get_candidate_generator = lambda **_: generator
            try:
                output = original(target, input_ids, assistant_model=drafter, **kwargs)
            finally:
                del target._get_candidate_generator
    generator.stats.verify_seconds = time.perf_counter() - began - generator.stats.draft_seconds
    generator.stats.notes += generator.proposer.notes()
    drafter.last_speculation = generator.stats
    if isinstance(output, torch.Tensor):
        return output
    return SpeculativeOutput(**output, speculation=generator.stats)
