/** The server's API as the page uses it. Knows HTTP and server-sent events; knows no page. */

export interface Token {
  id: number;
  text: string;
}

export interface TreeNode extends Token {
  parent: number | null;
  score: number; // log-probability of its path, as the tree was ranked
  probability: number; // given its path
}

/** `ddtree.round` of a chunk: docs/api.md. */
export interface Round {
  number: number;
  budget: number;
  nodes: TreeNode[]; // the root first; none where a prompt gave the token
  accepted: number[];
  bonus: Token | null;
  seconds: Record<string, number>; // by stage
}

export interface Chunk {
  text: string;
  round: Round | null;
  finish: string | null;
}

export interface Model {
  id: string;
  max_model_len: number;
  ddtree: { default_budget: number | "auto"; max_budget: number };
}

export interface Health {
  verifier_connected: boolean;
  running: number;
  waiting: number;
  drafters: string[];
  kv_pages: { total: number; free: number; kept: number; page_size: number };
  transport: string;
}

export interface Message {
  role: "user" | "assistant";
  content: string;
}

export class ServerError extends Error {}

const GONE = "The server does not answer. It may be restarting, or the connection was lost.";

async function ask(path: string, key: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  if (key) headers.set("Authorization", `Bearer ${key}`);
  let answer: Response;
  try {
    answer = await fetch(path, { ...init, headers });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ServerError(GONE);
  }
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    throw new ServerError(body?.error?.message ?? `The server answered ${answer.status}.`);
  }
  return answer;
}

export async function model(key: string): Promise<Model> {
  return (await (await ask("v1/models", key)).json()).data[0];
}

export async function health(signal: AbortSignal): Promise<Health> {
  return (await ask("health", "", { signal })).json();
}

export async function metrics(signal: AbortSignal): Promise<string> {
  return (await ask("metrics", "", { signal })).text();
}

/** The chunks of a streamed chat. Throws ServerError with what to tell people. */
export async function* chat(body: object, key: string, signal: AbortSignal): AsyncGenerator<Chunk> {
  const answer = await ask("v1/chat/completions", key, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const event of events(answer.body!, signal)) {
    const data = JSON.parse(event);
    if (data.error) throw new ServerError(data.error.message);
    const choice = data.choices[0];
    yield { text: choice.delta.content ?? "", round: data.ddtree?.round ?? null, finish: choice.finish_reason ?? null };
  }
}

/** The data of each event up to `[DONE]`. */
async function* events(body: ReadableStream<Uint8Array>, signal: AbortSignal): AsyncGenerator<string> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop()!;
      for (const part of parts) {
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        yield data;
      }
    }
  } catch (error) {
    if (signal.aborted || error instanceof ServerError) throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
  throw new ServerError(GONE);
}
