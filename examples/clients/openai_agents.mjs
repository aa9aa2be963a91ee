// An agent with two tools on the OpenAI Agents SDK for JavaScript; nothing here is about ctxreuse but the address.
//
// ctxreuse-edge serve                 # in another terminal
// npm install @openai/agents zod
// node examples/clients/openai_agents.mjs [URL]

import { Agent, OpenAIProvider, Runner, tool } from '@openai/agents';
import { z } from 'zod';

const getWeather = tool({
  name: 'get_weather',
  description: 'The weather in a city',
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});

const add = tool({
  name: 'add',
  description: 'Add two integers',
  parameters: z.object({ a: z.int(), b: z.int() }),
  execute: async ({ a, b }) => String(a + b),
});

const url = process.argv[2] ?? 'http://127.0.0.1:7351';
const runner = new Runner({
  modelProvider: new OpenAIProvider({ apiKey: 'none', baseURL: `${url}/v1` }),
  tracingDisabled: true,
});
// A model of a billion parameters or more decides by itself: leave out toolChoice.
const agent = new Agent({
  name: 'helper',
  instructions: 'You help with the weather and with sums.',
  model: 'smollm2',
  tools: [getWeather, add],
  modelSettings: { toolChoice: 'required', parallelToolCalls: false, temperature: 0, maxTokens: 256 },
});

let previousResponseId;
for (const question of ['What is the weather in Paris?', 'Add 2 and 3.', 'And in Rome?']) {
  const done = await runner.run(agent, question, { previousResponseId, maxTurns: 6 });
  previousResponseId = done.lastResponseId;
  for (const { rawItem } of done.newItems) {
    if (rawItem.type === 'function_call') console.log(`call    ${rawItem.name}(${rawItem.arguments})`);
  }
  const { usage } = done.rawResponses.at(-1);
  const [details] = usage.inputTokensDetails;
  console.log(`reused  ${details.cached_tokens} of ${usage.inputTokens} tokens of the prompt`);
  console.log(`answer  ${done.finalOutput}`);
}
