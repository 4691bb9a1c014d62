import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import tiny
import tiny_chat
import torch

from hf_dspark.evaluation.prompts import render
from hf_dspark.training.generation import GenerateAnswers, Request, Sampling, ServerAnswers


def requests():
    return [Request(i, 0, ({"role": "user", "content": p},), "test") for i, p in enumerate(tiny_chat.PROMPTS)]


@pytest.mark.parametrize("drafter", [False, True])
def test_greedy_answers_are_plain_generations_with_their_ids(drafter):
    target = tiny.make_target(**tiny.TARGETS["llama"][2])
    target.generation_config.eos_token_id = tiny_chat.EOS
    sampling = Sampling(temperatures=(0.0, 1.0), max_new_tokens=9)
    assistant = tiny.make_drafter(target) if drafter else None
    answers = GenerateAnswers(target, tiny_chat.make_tokenizer(), sampling, assistant, batch_size=2)
    rows = {row["prompt_id"]: row for row in answers(requests())}
    assert sorted(rows) == [0, 1, 2, 3]
    assert [rows[i]["temperature"] for i in range(4)] == [0.0, 1.0, 0.0, 1.0]
    for i in (0, 2):
        prompt = render(tiny_chat.make_tokenizer(), tiny_chat.PROMPTS[i])
        plain = target.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False, pad_token_id=0)[0].tolist()
        assert rows[i]["input_ids"] == plain and rows[i]["prompt_len"] == len(prompt)
        assert rows[i]["finished"] == (plain[-1] == tiny_chat.EOS)
    again = {row["prompt_id"]: row for row in answers(requests())}
    assert all(again[i]["input_ids"] == rows[i]["input_ids"] for i in rows), "sampling is keyed by the seed"


def test_answers_end_with_their_first_stop_token():
    target = tiny.make_target(**tiny.TARGETS["llama"][2])
    answers = GenerateAnswers(target, tiny_chat.make_tokenizer(), Sampling((0.0,), max_new_tokens=9), batch_size=4)
    longest = next(iter(answers(requests()[:1])))
    stop = longest["input_ids"][longest["prompt_len"] + 3]
    target.generation_config.eos_token_id = [stop]
    for row in answers(requests()):
        new = row["input_ids"][row["prompt_len"] :]
        assert row["finished"] == (stop in new) and stop not in new[:-1]


def test_a_server_is_asked_with_the_same_settings():
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, self.headers["Authorization"], body))
            choice = {"message": {"content": body["messages"][-1]["content"].upper()}, "finish_reason": "stop"}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"choices": [choice]}).encode())

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        sampling = Sampling((0.0, 0.7), max_new_tokens=5, seed=9, enable_thinking=False)
        rows = list(ServerAnswers(url, "name", sampling, parallel=2, key="secret")(requests()))
        server.shutdown()
    assert [row["messages"][-1]["content"] for row in rows] == [p.upper() for p in tiny_chat.PROMPTS]
    assert all(path == "/v1/chat/completions" and key == "Bearer secret" for path, key, _ in asked)
    bodies = sorted((body for _, _, body in asked), key=lambda b: b["seed"])
    assert [b["temperature"] for b in bodies] == [0.0, 0.7, 0.0, 0.7]
    assert bodies[0]["max_tokens"] == 5 and bodies[0]["chat_template_kwargs"] == {"enable_thinking": False}
