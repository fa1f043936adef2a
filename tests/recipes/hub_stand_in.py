"""A stand-in for the Hugging Face hub on this machine: the part of its API that an upload uses, and what it received.

Files of weights are received over LFS, as the hub asked for before it had Xet; all others come within a commit.
"""

import base64
import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

TOKEN, USER = "hf_ofThisTest", "someone"


@dataclass
class Hub:
    """What the stand-in has, and what it refuses.

    Attributes:
        repositories: files by path, by name of the repository.
        private: names of private repositories.
        commits: first lines of commit messages.
        refuses: parts of paths that are answered with 403.
    """

    repositories: dict = field(default_factory=dict)
    private: set = field(default_factory=set)
    commits: list = field(default_factory=list)
    refuses: tuple = ()
    objects: dict = field(default_factory=dict)  # bytes by SHA-256
    url: str = ""


@contextmanager
def running_hub():
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def response(self):
            status, content = respond(hub, self.command, self.path.partition("?")[0], self.headers, self.body())
            payload = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        do_GET = do_POST = do_PUT = response

        def body(self):
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = b""
            while size := int(self.rfile.readline(), 16):
                found += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return found

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def respond(hub, method, path, headers, body):
    """The status and the JSON content of a response."""
    if method == "PUT":  # what the LFS response below named; it needs no token
        hub.objects[path.rpartition("/")[2]] = body
        return 200, {}
    if headers.get("Authorization", "").lower() != f"bearer {TOKEN}".lower():
        return 401, {"error": "Invalid credentials"}
    if any(part in path for part in hub.refuses):
        return 403, {"error": "you may not do this"}
    if path == "/api/whoami-v2":
        return 200, {"type": "user", "name": USER, "orgs": []}
    if path == "/api/validate-yaml":
        return 200, {"errors": [], "warnings": []}
    sent = None if "/commit/" in path or not body else json.loads(body)
    if path == "/api/repos/create":
        return created(hub, sent)
    name = re.match(r"/(?:api/models/)?([^/]+/[^/]+?)(?:\.git)?/", path)[1]
    if name not in hub.repositories:
        return 404, {"error": "Repository not found"}
    if path.endswith("/auth-check/write"):
        return 200, {}
    if "/preupload/" in path:
        modes = {
            path: "lfs" if path.endswith(".safetensors") else "regular" for path in (f["path"] for f in sent["files"])
        }
        files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
        return 200, {"files": files}
    if path.endswith("/info/lfs/objects/batch"):
        places = [{**one, "actions": {"upload": {"href": f"{hub.url}/lfs/{one['oid']}"}}} for one in sent["objects"]]
        return 200, {"transfer": "basic", "objects": places}
    assert "/commit/" in path, path
    return committed(hub, name, [json.loads(line) for line in body.splitlines()])


def created(hub, sent):
    name = f"{sent.get('organization') or USER}/{sent['name']}"
    url = {"url": f"{hub.url}/{name}"}
    if name in hub.repositories:
        return 409, {"error": "You already created this model repo", **url}
    hub.repositories[name] = {}
    if sent.get("visibility") == "private" or sent.get("private"):
        hub.private.add(name)
    return 200, url


def committed(hub, name, lines):
    files = hub.repositories[name]
    for line in lines:
        value = line["value"]
        if line["key"] == "header":
            hub.commits.append(value["summary"])
        elif line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        else:
            assert line["key"] == "lfsFile" and hashlib.sha256(hub.objects[value["oid"]]).hexdigest() == value["oid"]
            files[value["path"]] = hub.objects[value["oid"]]
    return 200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1"}
