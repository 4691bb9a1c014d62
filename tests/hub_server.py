"""A Hub in 100 lines: enough of its HTTP API to download from repos by revision, and to push commits to them."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """`repos[id][revision]` maps paths to bytes. `faults[path]` may be "cut" (half the bytes) or "flip" (one bit
    wrong).

    `requests` lists "METHOD /path" in order; `tokens` the authorization headers seen.
    """

    def __init__(self):
        self.repos, self.faults, self.requests, self.tokens = {}, {}, [], set()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def add(self, repo, folder, revision="main"):
        files = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        self.repos.setdefault(repo, {})[revision] = files

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def commit_of(files) -> str:
    return hashlib.sha1(repr(sorted((k, hashlib.sha1(v).digest()) for k, v in files.items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"  # one connection per request: a client must not keep one to an earlier server

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        body = json.dumps(body).encode() if isinstance(body, (dict, list)) else body
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def note(self):
        path = unquote(urlparse(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        self.hub.tokens.add(self.headers.get("Authorization"))
        return path

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.note()
        if path == "/api/whoami-v2":
            return self.answer(200, {"name": "me", "type": "user", "orgs": []})
        if found := re.fullmatch(r"/(?:api/resolve-cache/models/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*found.groups())
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", path):
            files = self.hub.repos.get(found[1], {}).get(found[2] or "main")
            if files is not None:
                siblings = [{"rfilename": name} for name in files]
                return self.answer(
                    200, {"id": found[1], "sha": commit_of(files), "siblings": siblings, "private": False}
                )
        self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")

    def resolve(self, repo, revision, name):
        revisions = self.hub.repos.get(repo)
        if revisions is None:
            return self.answer(404, X_Error_Code="RepoNotFound")
        by_commit = {commit_of(files): files for files in revisions.values()}
        files = revisions.get(revision, by_commit.get(revision))
        if files is None:
            return self.answer(404, X_Error_Code="RevisionNotFound")
        commit = commit_of(files)
        if name not in files:
            return self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
        content = files[name]
        digest = hashlib.sha256 if name.endswith((".safetensors", ".bin")) else hashlib.sha1
        headers = {"ETag": f'"{digest(content).hexdigest()}"', "X_Repo_Commit": commit}
        if self.command == "GET" and self.hub.faults.get(name) == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        if self.command == "GET" and self.hub.faults.get(name) == "cut":
            content = content[: len(content) // 2]
        self.answer(200, content, **headers)

    def do_POST(self):
        path = self.note()
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            if repo in self.hub.repos:
                return self.answer(409, {"error": "exists", "url": f"{self.hub.url}/{repo}"})
            self.hub.repos[repo] = {"main": {}}
            return self.answer(200, {"url": f"{self.hub.url}/{repo}", "id": repo, "name": repo})
        if path == "/api/validate-yaml":
            return self.answer(200, {"errors": [], "warnings": []})
        if found := re.fullmatch(r"/api/models/(.+)/preupload/([^/]+)", path):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.answer(200, {"files": files})
        if found := re.fullmatch(r"/api/models/(.+)/commit/([^/]+)", path):
            files = self.hub.repos[found[1]].setdefault(found[2], {})
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = commit_of(files)
            url = f"{self.hub.url}/{found[1]}/commit/{commit}"
            return self.answer(200, {"success": True, "commitOid": commit, "commitUrl": url})
        self.answer(404, {"error": f"no such endpoint {path}"})
