"""The stand-in's answers to responses and messages, in vLLM's shapes."""

import json

from aiohttp import web


def text_of(body):
    """What the model is asked, as one text."""
    asked = body.get("input", body.get("messages"))
    turns = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    before = body.get("instructions") or body.get("system") or ""
    return "".join([before, *(f"<{each['role']}>{each['content']}" for each in turns), "<assistant>"])


class Response:
    """`/v1/responses`."""

    limit = "max_output_tokens"

    def __init__(self, engine, body, prompt, steps):
        self.body, self.steps = body, steps
        counts = engine.cached(body, prompt)
        usage = {"input_tokens": len(prompt), "output_tokens": len(steps), "total_tokens": len(prompt) + len(steps)}
        usage["input_tokens_details"] = {"cached_tokens": counts[0], "cache_write_tokens": counts[1]}
        usage["output_tokens_details"] = {"reasoning_tokens": 0}
        text = "".join(delta for delta, _, _ in steps)
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        kept = {"id": body.get("request_id") or "resp_odd", "created_at": 5, "model": "hash", "object": "response"}
        self.begun = {**kept, "output": [], "status": "in_progress", "usage": None}
        self.whole = {**self.begun, "output": [message], "status": "completed", "usage": usage}

    def events(self):
        yield "response.created", {"response": self.begun}
        yield "response.in_progress", {"response": self.begun}
        for delta, _, _ in self.steps:
            yield "response.output_text.delta", {"delta": delta}
        yield "response.completed", {"response": self.whole}


class Message:
    """`/v1/messages`."""

    limit = "max_tokens"

    def __init__(self, engine, body, prompt, steps):
        self.steps = steps
        cached, created = engine.cached(body, prompt)
        counts = {"input_tokens": len(prompt), "output_tokens": 0}
        told = {"cache_read_input_tokens": cached, "cache_creation_input_tokens": created}
        usage = {**counts, "output_tokens": len(steps)}
        if engine.server.details:
            usage |= {"input_tokens": len(prompt) - cached - created, **told}
        text = "".join(delta for delta, _, _ in steps)
        self.begun = {"id": "msg", "type": "message", "role": "assistant", "content": [], "usage": counts}
        self.whole = {**self.begun, "content": [{"type": "text", "text": text}], "usage": usage}
        self.whole["stop_reason"] = {"stop": "end_turn", "length": "max_tokens"}.get(steps[-1][2])

    def events(self):
        yield "message_start", {"message": self.begun}
        for delta, _, _ in self.steps:
            yield "content_block_delta", {"delta": {"type": "text_delta", "text": delta}}
        yield "message_delta", {"delta": {"stop_reason": self.whole["stop_reason"]}, "usage": self.whole["usage"]}
        yield "message_stop", {}


SHAPES = {"/v1/responses": Response, "/v1/messages": Message}


async def answered(engine, request, shape):
    """The answer, whole or as a stream."""
    if not shape.steps:
        raise ValueError("there is nothing to answer")
    body = json.loads(await request.read())
    if not body.get("stream"):
        return web.json_response(shape.whole)
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8", **engine.headers})
    await stream.prepare(request)
    for number, (name, event) in enumerate(shape.events()):
        if number == 3 and engine.fault == "reset_mid":
            request.transport.abort()
        if number == 3 and engine.fault == "end_mid":
            return stream
        if number == 3 and engine.fault == "hold_end":
            await engine.released.wait()
            await stream.write(engine.end)
            return stream
        data = json.dumps({"type": name, **event}, separators=(",", ":"))
        await stream.write(f"event: {name}\ndata: {data}\n\n".encode())
    return stream
