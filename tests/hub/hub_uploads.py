"""What a Hugging Face hub answers to those who upload: a repository is made, large files come first, then a commit."""

import base64
import hashlib
import json
import re
from typing import Any

UPLOADS = re.compile(
    r"/(?:api/models/([^/]+/[^/]+)/(preupload|commit)/main|([^/]+/[^/]+)\.git/info/lfs/objects/(batch))"
)


class Uploads:
    """Mixed into the answers of a hub; large files wait under the hash of their content until a commit names them."""

    hub: Any
    path: str
    headers: Any
    rfile: Any
    close_connection: bool
    _json: Any
    _refuse: Any
    _send: Any

    def takes(self, path: str) -> bool:
        """Whether a question was one of an upload, and was answered."""
        if path in ("/api/repos/create", "/api/validate-yaml"):
            self._prepared(path)
        elif found := UPLOADS.fullmatch(path):
            name, what = found[1] or found[3], found[2] or found[4]
            {"preupload": self._modes, "batch": self._batch, "commit": self._commit}[what](name)
        else:
            return False
        return True

    def do_PUT(self) -> None:
        """A large file."""
        self.hub.asked.append(f"PUT {self.path}")
        length = int(self.headers["Content-Length"])
        if self.hub.uploads_break_off > 0:
            self.hub.uploads_break_off -= 1
            self.rfile.read(length // 2)
            self.close_connection = True
            return
        content = self.rfile.read(length)
        self.hub.objects[hashlib.sha256(content).hexdigest()] = content
        self._send(200, b"")

    def _body(self) -> bytes:
        found: bytes = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return found

    def _prepared(self, path: str) -> None:
        asked = json.loads(self._body())
        if path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif self.hub.read_only:
            self._refuse(403, "Forbidden", "You don't have the rights to create a model here")
        else:
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.hub.create(name, private=asked.get("visibility") == "private" or asked.get("private") is True)
            self._json({"url": f"{self._here}/{name}", "name": name, "id": "0" * 24})

    @property
    def _here(self) -> str:
        return f"http://{self.headers['Host']}"

    def _modes(self, name: str) -> None:
        files = json.loads(self._body())["files"]
        mode = {True: "lfs", False: "regular"}
        found = [{"path": f["path"], "uploadMode": mode[f["path"].endswith(".safetensors")]} for f in files]
        self._json({"files": [{**each, "shouldIgnore": False, "oid": None} for each in found]})

    def _batch(self, name: str) -> None:
        """Where each large file goes; those that are here already go nowhere."""
        objects = json.loads(self._body())["objects"]
        place = {"upload": {"href": f"{self._here}/upload"}}
        found = [o if o["oid"] in self.hub.objects else {**o, "actions": place} for o in objects]
        self._json({"transfer": "basic", "objects": found})

    def _commit(self, name: str) -> None:
        lines = [json.loads(line) for line in self._body().splitlines()]
        if self.hub.commits_fail:
            self._refuse(400, "BadRequest", "the commit was refused")
            return
        files = self.hub.models[name].files
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        where = f"{self._here}/{name}/commit/{'1' * 40}"
        self._json({"success": True, "commitOid": "1" * 40, "commitUrl": where, "hookOutput": ""})
