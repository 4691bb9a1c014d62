"""Training answers from the target itself: as tokens by generate(), or as text from a server with OpenAI's
interface."""

import json
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

import torch


@dataclass(frozen=True)
class Request:
    """A chat to be answered: `id` of its prompt, `turn` of its conversation, `messages` up to a user's."""

    id: int
    turn: int
    messages: tuple
    source: str


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn. Prompt i takes `temperatures[i % len]`, so greedy (0) and sampled answers mix; no top-k or
    top-p.

    `enable_thinking` goes to the chat template; None leaves the template's default.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_new_tokens: int = 512
    seed: int = 0
    enable_thinking: bool | None = None

    def temperature(self, request: Request) -> float:
        return self.temperatures[request.id % len(self.temperatures)]

    def to_dict(self) -> dict:
        return json.loads(json.dumps(asdict(self)))


def _row(request: Request, sampling: Sampling, answer: str, **more) -> dict:
    messages = [*request.messages, {"role": "assistant", "content": answer}]
    facts = {"prompt_id": request.id, "turn": request.turn, "source": request.source}
    return {**facts, "temperature": sampling.temperature(request), "messages": messages, **more}


class GenerateAnswers:
    """Answers of a target, in batches; rows hold the exact ids.

    Args:
        target, tokenizer; drafter (*optional*): one of ours, to speed it up. batch_size (`int`).
    """

    def __init__(self, target, tokenizer, sampling: Sampling, drafter=None, batch_size: int = 8):
        self.target, self.tokenizer, self.sampling = target, tokenizer, sampling
        self.drafter, self.batch_size = drafter, batch_size

    def __call__(self, requests: Iterable[Request]) -> Iterator[dict]:
        """A row per request: "input_ids", "prompt_len", "messages", "temperature", "finished" and where it came
        from."""
        waiting: dict[float, list[Request]] = {}
        for request in requests:
            batch = waiting.setdefault(self.sampling.temperature(request), [])
            batch.append(request)
            if len(batch) == self.batch_size:
                yield from self._answer(waiting.pop(self.sampling.temperature(request)))
        for batch in waiting.values():
            yield from self._answer(batch)

    def _ids(self, request: Request) -> list[int]:
        thinking = self.sampling.enable_thinking
        options = {} if thinking is None else {"enable_thinking": thinking}
        out = self.tokenizer.apply_chat_template(
            list(request.messages), add_generation_prompt=True, tokenize=True, return_dict=True, **options
        )
        return list(out["input_ids"])

    def _answer(self, batch: list[Request]) -> Iterator[dict]:
        prompts = [self._ids(request) for request in batch]
        width = max(map(len, prompts))
        ids = torch.zeros(len(batch), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for r, prompt in enumerate(prompts):
            ids[r, width - len(prompt) :] = torch.tensor(prompt)
            mask[r, width - len(prompt) :] = 1
        temperature = self.sampling.temperature(batch[0])
        options = {"do_sample": False}
        if temperature > 0:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
            torch.manual_seed(self.sampling.seed * 1_000_003 + batch[0].id)
        device, stops = self.target.device, self.target.generation_config.eos_token_id
        stops = {stops} if isinstance(stops, int) else set(stops or ())
        out = self.target.generate(
            input_ids=ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=self.sampling.max_new_tokens,
            pad_token_id=self.tokenizer.pad_token_id or next(iter(stops), 0),
            assistant_model=self.drafter,
            **options,
        )
        for request, prompt, new in zip(batch, prompts, out[:, width:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(new) if token in stops), None)
            new = new[:end]
            text = self.tokenizer.decode(new, skip_special_tokens=True)
            more = {"input_ids": prompt + new, "prompt_len": len(prompt), "finished": end is not None}
            yield _row(request, self.sampling, text, **more)


class ServerAnswers:
    """Answers of a model behind `{url}/chat/completions`; rows hold text, which training renders with the chat
    template.

    Args:
        url (`str`): base, e.g. "http://localhost:8000/v1". model (`str`): its name there. parallel (`int`): requests at
            once.
        key (`str`, *optional*): bearer token. timeout (`float`): seconds for an answer.
    """

    def __init__(
        self, url: str, model: str, sampling: Sampling, parallel: int = 16, key: str | None = None, timeout=600.0
    ):
        self.url, self.model, self.sampling = url.rstrip("/") + "/chat/completions", model, sampling
        self.parallel, self.key, self.timeout = parallel, key, timeout

    def __call__(self, requests: Iterable[Request]) -> Iterator[dict]:
        with ThreadPoolExecutor(self.parallel) as pool:
            yield from pool.map(self._answer, requests)

    def _answer(self, request: Request) -> dict:
        body = {
            "model": self.model,
            "messages": list(request.messages),
            "temperature": self.sampling.temperature(request),
            "top_p": 1.0,
            "max_tokens": self.sampling.max_new_tokens,
            "seed": self.sampling.seed + request.id,
        }
        if self.sampling.enable_thinking is not None:
            body["chat_template_kwargs"] = {"enable_thinking": self.sampling.enable_thinking}
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        call = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(call, timeout=self.timeout) as answer:
            choice = json.load(answer)["choices"][0]
        return _row(
            request, self.sampling, choice["message"]["content"], finished=choice.get("finish_reason") == "stop"
        )
