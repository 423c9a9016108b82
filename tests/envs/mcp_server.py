"""A small MCP server over stdin and stdout, which runs in the sandbox of a test: good, or bad in the way that is asked.

Its argument says what it does wrong from the start; its tool `do` does what its argument `what` says.
"""

import json
import os
import sys
import time

WRONG = sys.argv[1] if len(sys.argv) > 1 else ""
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, "required": ["a", "b"]}
ANYTHING = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
NESTED = json.loads('{"items": ' * 100 + "{}" + "}" * 100)
IMAGE = {"type": "image", "data": "x" * 100, "mimeType": "image/png"}
TOOLS = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": {**NUMBERS, "additionalProperties": False}},
    {"name": "do", "description": "Do what is asked.", "inputSchema": ANYTHING},
    {"name": "2-with.dots", "inputSchema": {"type": "object"}},
]
LISTS = {
    "many": [{**TOOLS[0], "name": f"add{number}"} for number in range(10_000)],
    "rather-many": [{**TOOLS[0], "name": f"add{number}"} for number in range(200)],
    "nested": [{"name": "add", "inputSchema": NESTED}],
    "large": [{"name": "add", "inputSchema": {"description": "x" * 30_000}}],
    "wide": [{"name": "add", "inputSchema": {"properties": {str(number): True for number in range(200)}}}],
    "nameless": [{"inputSchema": NUMBERS}],
    "twice": [TOOLS[0], TOOLS[0]],
    "no-object": [{"name": "add", "inputSchema": {"properties": ["a"]}}],
}
RESULTS = {
    "image": {"content": [IMAGE, {"type": "text", "text": "see"}, {"type": "resource_link", "uri": "file:///x"}, 7]},
    "structure": {"content": [], "structuredContent": {"sum": 5}},
    "fail": {"content": [{"type": "text", "text": "no such thing"}], "isError": True},
    "long": {"content": [{"type": "text", "text": "y" * 100_000}]},
    "parts": {"content": [{"type": "text", "text": "p"}] * 150},
    "surrogate": {"content": [{"type": "text", "text": "\ud800"}]},
    "nonsense": {"content": 3},
}
late: "list[object]" = []


def say(**message: object) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def do(number: object, what: str) -> None:
    if what in RESULTS:
        say(id=number, result=RESULTS[what])
    elif what == "refuse":
        say(id=number, error={"code": -32602, "message": "I will not"})
    elif what == "die":
        sys.stderr.write("I am dying\n")
        os._exit(7)
    elif what == "flood":
        while True:
            sys.stdout.write("x" * 65536)
    elif what == "chatter":
        while True:
            say(method="notifications/message", params={"level": "info", "data": "hello"})
    elif what == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(b"x") * (1 << 20))
    elif what == "remark":
        note = {"jsonrpc": "2.0", "method": "notifications/tools/list_changed"}
        answer = {"jsonrpc": "2.0", "id": number, "result": RESULTS["structure"]}
        sys.stdout.write(f"{json.dumps(answer)}\n{json.dumps(note)}\n")
        sys.stdout.flush()
    elif what == "lie":
        say(id=number)
    elif what == "wait":
        late.append(number)
    elif what == "sleep":
        while not os.path.exists("awake"):
            time.sleep(0.01)
    elif what == "ask":
        say(id="q1", method="ping")
        say(id="q2", method="sampling/createMessage", params={})
        answers = [json.loads(sys.stdin.readline()) for _ in range(2)]
        said = "result" in answers[0] and answers[1]["error"]["code"] == -32601
        say(id=number, result={"content": [{"type": "text", "text": f"answered: {said}"}]})


def answer(request: dict) -> None:  # type: ignore[type-arg]
    number, method, params = request["id"], request["method"], request.get("params", {})
    if method == "initialize":
        version = "1999-01-01" if WRONG == "version" else params["protocolVersion"]
        about = {"name": "test", "version": "1"}
        say(id=number, result={"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about})
    elif method == "tools/list" and WRONG == "pages":
        say(id=number, result={"tools": [], "nextCursor": "more"})
    elif method == "tools/list" and WRONG == "large-pages":
        say(id=number, result={"tools": [{"name": "add", "description": "x" * (5 << 20)}], "nextCursor": "more"})
    elif method == "tools/list" and WRONG != "two-pages":
        say(id=number, result={"tools": LISTS.get(WRONG, TOOLS)})
    elif method == "tools/list":
        page = {"tools": TOOLS[1:]} if params.get("cursor") == "more" else {"tools": TOOLS[:1], "nextCursor": "more"}
        say(id=number, result=page)
    elif params["name"] == "add":
        while late:
            say(id=late.pop(), result={"content": [{"type": "text", "text": "too late"}]})
        total = params["arguments"]["a"] + params["arguments"]["b"]
        say(id=number, result={"content": [{"type": "text", "text": str(total)}]})
    elif params["name"] == "do":
        do(number, params["arguments"]["what"])
    else:
        say(id=number, result={"content": [{"type": "text", "text": json.dumps(params["arguments"])}]})


if WRONG == "dead":
    sys.exit("there is no database")
for line in sys.stdin:
    try:
        message = json.loads(line)
    except ValueError:
        say(id=None, error={"code": -32700, "message": "this is no JSON"})
        continue
    if WRONG == "noisy":
        print("DEBUG: a line that is no message", "\n[1, 2]", '\n{"jsonrpc": "2.0", "id": 999, "result": {}}')
    if "id" in message and WRONG != "silent":
        answer(message)
