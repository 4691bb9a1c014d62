"""A griffe extension: docstrings in the style of transformers' own become what mkdocstrings renders.

[`Name`] becomes a link to a public name. "name (`type`, *optional*, defaults to 1): ..." loses its marks, as the
signature shows the default. "Args (and those of [`Base`]):" becomes a sentence and a section.
"""

import re

import griffe

REFERENCE = re.compile(r"\[`(?P<name>[\w.]+)`\](?![\[(])")
ARGUMENT = re.compile(r"^(?P<head> +\w+ )\((?P<type>.*?)\):", re.M)
BASE = re.compile(r"^Args \((?P<note>and those of \[`\w+`\](?P<more>[^)]*))\):", re.M)


class Docstrings(griffe.Extension):
    def on_package(self, *, pkg, **kwargs):
        self.public = {str(name) for name in pkg.exports or ()}
        self._walk(pkg)

    def _walk(self, obj):
        if obj.is_alias:
            return
        if obj.docstring:
            text = BASE.sub(r"Takes these arguments, \g<note>.\n\nArgs:", obj.docstring.value)
            text = ARGUMENT.sub(self._argument, text)
            obj.docstring.value = REFERENCE.sub(self._link, text)
        for member in obj.members.values():
            self._walk(member)

    def _argument(self, match) -> str:
        kind = re.sub(r", (\*optional\*|defaults to .*)", "", match["type"])
        kind = "" if kind == "*optional*" else re.sub(r"[`\[\]]", "", kind)
        return f"{match['head']}({kind}):" if kind else f"{match['head'].rstrip()}:"

    def _link(self, match) -> str:
        name = match["name"]
        return f"[`{name}`][hf_dspark.{name}]" if name.split(".")[0] in self.public else f"`{name}`"
