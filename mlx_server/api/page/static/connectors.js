// Answers with MCP connectors: the request for /v1/responses and its events. No DOM.

import { inputOf } from "./files.js";

/** The body of a request whose tools the server runs itself, with the user's approval or without. */
export function responsesBody({ request, connectors, approval }, messages) {
  const { max_tokens, reasoning_effort, response_format, tools = [], ...rest } = request;
  const servers = connectors.map((name) => (
    { type: "mcp", connector_id: name, server_label: labelOf(name), require_approval: approval }
  ));
  const functions = tools.map(({ type, function: called, ...tool }) => ({ type, ...tool, ...called }));
  const body = { ...rest, input: messages.flatMap(itemsOf), tools: [...servers, ...functions] };
  if (max_tokens) body.max_output_tokens = max_tokens;
  if (reasoning_effort) body.reasoning = { effort: reasoning_effort };
  if (response_format) body.text = { format: { type: "json_schema", ...response_format.json_schema } };
  return { ...body, store: false };
}

const labelOf = (name) => name.replaceAll(/[^\w-]/g, "_");

function itemsOf({ role, content, reasoning_content, tool_calls = [], tool_call_id, mcp_call, approval }) {
  if (mcp_call) return [{ type: "mcp_call", ...labelled(mcp_call) }];
  if (approval) {
    const { allowed: approve, ...call } = labelled(approval);
    const answer = { type: "mcp_approval_response", approval_request_id: call.id, approve };
    return [{ type: "mcp_approval_request", ...call }, answer];
  }
  if (role === "tool") return [{ type: "function_call_output", call_id: tool_call_id, output: content }];
  const calls = tool_calls.map(({ id, function: called }) => ({ type: "function_call", call_id: id, ...called }));
  const thoughts = reasoning_content
    ? [{ type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: reasoning_content }] }] : [];
  const message = content ? [{ type: "message", role, content: role === "user" ? inputOf(content) : content }] : [];
  return [...thoughts, ...message, ...calls];
}

const labelled = ({ server, ...call }) => ({ ...call, server_label: server });

/** Adds an event of a stream to an answer. */
export function addResponsesEvent(answer, event) {
  switch (event.type) {
    case "response.output_text.delta":
      answer.text += begun(answer, event.delta);
      break;
    case "response.reasoning_text.delta":
    case "response.reasoning_summary_text.delta":
      answer.thought += begun(answer, event.delta);
      break;
    case "response.output_item.added":
    case "response.output_item.done":
      addItem(answer, event.item);
      break;
    case "response.completed":
    case "response.incomplete":
      end(answer, event.response);
      break;
    case "response.failed":
      throw new Error(event.response.error?.message ?? "The server reports an error.");
    case "error":
      throw new Error(event.message ?? event.error?.message ?? "The server reports an error.");
  }
}

function begun(answer, delta) {
  answer.first ??= performance.now();
  return delta;
}

function addItem(answer, item) {
  if (item.type === "mcp_call") {
    const { id, server_label: server, name, output, error } = item;
    const failed = typeof error === "string" ? error : error?.message ?? (error && JSON.stringify(error));
    const { after } = answer.serverCalls.find((each) => each.id === id)
      ?? { after: [answer.text.length, answer.thought.length] }; // what was said before it
    const call = { id, server, name, arguments: item.arguments ?? "", output: output ?? failed ?? "", after };
    answer.serverCalls = [...answer.serverCalls.filter((each) => each.id !== id), call];
  } else if (item.type === "mcp_approval_request") {
    const { id, server_label: server, name } = item;
    const call = { id, server, name, arguments: item.arguments ?? "", allowed: null };
    answer.approvals = [...answer.approvals.filter((each) => each.id !== id), call];
  } else if (item.type === "function_call") {
    const call = { id: item.call_id, name: item.name, arguments: item.arguments ?? "" };
    answer.calls = [...answer.calls.filter((each) => each.id !== call.id), call];
  } else if (item.type === "mcp_list_tools" && item.error) {
    answer.notes.push(`${item.server_label}: ${JSON.stringify(item.error)}`);
  }
}

function end(answer, { usage, incomplete_details: details }) {
  answer.finish = details ? "length" : answer.calls.length || answer.approvals.length ? "tool_calls" : "stop";
  if (!usage) return;
  answer.usage = {
    prompt_tokens: usage.input_tokens,
    completion_tokens: usage.output_tokens,
    prompt_tokens_details: usage.input_tokens_details,
    completion_tokens_details: usage.output_tokens_details,
  };
}
