"""A small S3 server for tests: one bucket's worth of objects in memory, in a process of its own.

    python -m tests.s3_server [HOST]      prints its port; ends when its standard input is closed

A line "hold TEXT" on the standard input makes uploads of objects with this text in their name wait, until a line
"release" comes; each line is answered with the same line.

Speaks what s3fs needs: objects (whole, in ranges, copied, in parts), listings with prefix and delimiter, and removal of
many objects. Requests must be signed with the access key below; the signature itself is not verified.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

ACCESS_KEY = "raylane-tests"
DATE = "2026-01-01T00:00:00.000Z"


class Store:
    """Objects by "bucket/key", and the parts of uploads that are not complete."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.held: str | None = None
        """Uploads of names with this text wait; None for no upload."""
        self.released = threading.Condition()


def etag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def without_chunks(body: bytes) -> bytes:
    """Return the content of a body in the encoding aws-chunked: <hex size>[;signature] CRLF <bytes> CRLF ..."""
    content = b""
    while body:
        head, _, rest = body.partition(b"\r\n")
        size = int(head.split(b";")[0], 16)
        if size == 0:
            break
        content, body = content + rest[:size], rest[size + 2 :]
    return content


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: Store

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def fail(self, status: int, code: str) -> None:
        self.reply(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def xml(self, text: str) -> None:
        self.reply(200, f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode(), Content_Type="application/xml")

    def handle_request(self) -> None:
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        self.key = unquote(parts.path).strip("/")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if "aws-chunked" in self.headers.get("Content-Encoding", ""):
            body = without_chunks(body)
        if f"Credential={ACCESS_KEY}/" not in self.headers.get("Authorization", ""):
            return self.fail(403, "InvalidAccessKeyId")
        with self.store.released:
            if self.command in ("PUT", "POST"):
                self.store.released.wait_for(lambda: self.store.held is None or self.store.held not in self.key)
        with self.store.lock:
            getattr(self, f"on_{self.command.lower()}")(body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

    def on_get(self, body: bytes) -> None:
        if "/" not in self.key:
            return self.list_objects()
        content = self.store.objects.get(self.key)
        if content is None:
            return self.fail(404, "NoSuchKey")
        headers = {"ETag": etag(content), "Last_Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if wanted := re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, end = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
            if start >= len(content):
                return self.fail(416, "InvalidRange")
            span = f"bytes {start}-{end - 1}/{len(content)}"
            return self.reply(206, content[start:end], Content_Range=span, **headers)
        return self.reply(200, content, **headers)

    def on_head(self, body: bytes) -> None:
        if "/" not in self.key:
            return self.reply(200)
        content = self.store.objects.get(self.key)
        if content is None:
            return self.reply(404)
        modified = "Thu, 01 Jan 2026 00:00:00 GMT"
        return self.reply(200, ETag=etag(content), Content_Length=str(len(content)), Last_Modified=modified)

    def list_objects(self) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        files, folders = "", set()
        count = 0
        for name, content in sorted(self.store.objects.items()):
            bucket, _, key = name.partition("/")
            if bucket != self.key or not key.startswith(prefix):
                continue
            inner = key[len(prefix) :]
            if delimiter and delimiter in inner:
                folders.add(prefix + inner.partition(delimiter)[0] + delimiter)
                continue
            count += 1
            files += (
                f"<Contents><Key>{escape(key)}</Key><Size>{len(content)}</Size><LastModified>{DATE}</LastModified>"
                f"<ETag>{escape(etag(content))}</ETag></Contents>"
            )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(folders))
        head = f"<Name>{self.key}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
        self.xml(
            f"<ListBucketResult>{head}<KeyCount>{count + len(folders)}</KeyCount>{files}{common}</ListBucketResult>"
        )

    def on_put(self, body: bytes) -> None:
        objects = self.store.objects
        if source := self.headers.get("x-amz-copy-source"):
            content = objects.get(unquote(source).strip("/").partition("?")[0])
            if content is None:
                return self.fail(404, "NoSuchKey")
            objects[self.key] = content
            tag = f"<ETag>{escape(etag(content))}</ETag><LastModified>{DATE}</LastModified>"
            return self.xml(f"<CopyObjectResult>{tag}</CopyObjectResult>")
        if "uploadId" in self.query:
            self.store.parts[self.query["uploadId"]][int(self.query["partNumber"])] = body
        elif "/" in self.key:
            objects[self.key] = body
        return self.reply(200, ETag=etag(body))

    def on_post(self, body: bytes) -> None:
        if "delete" in self.query:
            for key in re.findall(r"<Key>(.*?)</Key>", body.decode()):
                self.store.objects.pop(f"{self.key}/{unescape(key)}", None)
            return self.xml("<DeleteResult></DeleteResult>")
        bucket, _, key = self.key.partition("/")
        named = f"<Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        if "uploads" in self.query:
            upload = f"upload{next(self.store.numbers)}"
            self.store.parts[upload] = {}
            text = f"{named}<UploadId>{upload}</UploadId>"
            return self.xml(f"<InitiateMultipartUploadResult>{text}</InitiateMultipartUploadResult>")
        parts = self.store.parts.pop(self.query["uploadId"])
        content = b"".join(part for _, part in sorted(parts.items()))
        self.store.objects[self.key] = content
        text = f"{named}<ETag>{escape(etag(content))}</ETag>"
        return self.xml(f"<CompleteMultipartUploadResult>{text}</CompleteMultipartUploadResult>")

    def on_delete(self, body: bytes) -> None:
        if "uploadId" in self.query:
            self.store.parts.pop(self.query["uploadId"], None)
        else:
            self.store.objects.pop(self.key, None)
        self.reply(204)


class Server:
    """Server in a process of its own. `variables`: the environment variables with which s3fs uses it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.variables = variables(f"http://127.0.0.1:{process.stdout.readline().strip()}")

    def hold(self, text: str) -> None:
        """Make uploads of objects wait whose name contains this text."""
        self._say(f"hold {text}")

    def release(self) -> None:
        """Let all uploads continue."""
        self._say("release")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == line + "\n"


@contextlib.contextmanager
def s3_server() -> Iterator[Server]:
    """Run the server during the `with` block."""
    command = [sys.executable, "-m", "tests.s3_server"]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        try:
            yield Server(process)
        finally:
            process.stdin.close()
            process.wait(30)


def variables(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def main() -> None:
    Handler.store = Store()
    with ThreadingHTTPServer((sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        print(server.server_address[1], flush=True)
        for line in sys.stdin:
            word, _, text = line.strip().partition(" ")
            with Handler.store.released:
                Handler.store.held = text if word == "hold" else None
                Handler.store.released.notify_all()
            print(line, end="", flush=True)
        server.shutdown()


if __name__ == "__main__":
    main()
