"""A griffe extension: [`Name`] in a docstring becomes a link to a public name, as in transformers' own documentation."""

import re

import griffe

REFERENCE = re.compile(r"\[`(?P<name>[\w.]+)`\](?![\[(])")


class Links(griffe.Extension):
    def on_package(self, *, pkg, **kwargs):
        self.public = {str(name) for name in pkg.exports or ()}
        self._walk(pkg, set())

    def _walk(self, obj, seen):
        if obj.is_alias or obj.path in seen:
            return
        seen.add(obj.path)
        if obj.docstring:
            obj.docstring.value = REFERENCE.sub(self._link, obj.docstring.value)
        for member in obj.members.values():
            self._walk(member, seen)

    def _link(self, match) -> str:
        name = match["name"]
        return f"[`{name}`][hf_dspark.{name}]" if name.split(".")[0] in self.public else f"`{name}`"
