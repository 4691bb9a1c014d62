"""Text on the screen as it is generated, with the drafter's accepted tokens in colour."""

from hf_dspark.evaluation.timing import Clock


class DraftPrinter(Clock):
    """Prints what comes; all tokens of a round but the last were drafted. Measures time as well.

    Text is held back while it ends inside a character.
    """

    def __init__(self, tokenizer, console, drafted: str = "green"):
        super().__init__()
        self.tokenizer, self.console, self.drafted = tokenizer, console, drafted
        self.ids: list[int] = []
        self.printed = 0

    def put(self, value) -> None:
        prompt = self.started is None
        super().put(value)
        if prompt:
            return
        tokens = value.flatten().tolist()
        for i, token in enumerate(tokens):
            self.ids.append(token)
            self._print(self.drafted if i + 1 < len(tokens) else None)

    def end(self) -> None:
        super().end()
        self.console.print()

    def _print(self, style: str | None) -> None:
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("\ufffd"):
            self.console.print(text[self.printed :], style=style, end="", markup=False, soft_wrap=True)
            self.printed = len(text)
