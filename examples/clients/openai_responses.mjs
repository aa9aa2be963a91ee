// An agent with two tools on the Responses API of the official OpenAI SDK for JavaScript; nothing here is about ctxreuse
// but the address.
//
// ctxreuse-edge serve                 # in another terminal
// npm install openai
// node examples/clients/openai_responses.mjs [URL]

import OpenAI from 'openai';

const functions = {
  get_weather: ({ city }) => `It is sunny in ${city}.`,
  add: ({ a, b }) => String(a + b),
};
const describe = (name, description, properties) => ({
  type: 'function',
  name,
  description,
  parameters: { type: 'object', properties, required: Object.keys(properties), additionalProperties: false },
  strict: true,
});
const tools = [
  describe('get_weather', 'The weather in a city', { city: { type: 'string' } }),
  describe('add', 'Add two integers', { a: { type: 'integer' }, b: { type: 'integer' } }),
];

const url = process.argv[2] ?? 'http://127.0.0.1:7351';
const client = new OpenAI({ apiKey: 'none', baseURL: `${url}/v1`, timeout: 600_000 });
let answer = null;
for (const question of ['What is the weather in Paris?', 'Add 2 and 3.', 'And in Rome?']) {
  let input = [{ role: 'user', content: question }];
  // A model of a billion parameters or more decides by itself: 'auto'.
  for (const choice of ['required', 'none']) {
    const events = await client.responses.create({
      model: 'smollm2',
      instructions: 'You help with the weather and with sums.',
      input,
      tools,
      tool_choice: choice,
      parallel_tool_calls: false,
      max_output_tokens: 64,
      temperature: 0,
      previous_response_id: answer?.id,
      stream: true,
    });
    for await (const event of events) answer = event.response ?? answer;
    input = [];
    for (const call of answer.output.filter((item) => item.type === 'function_call')) {
      const result = functions[call.name](JSON.parse(call.arguments));
      input.push({ type: 'function_call_output', call_id: call.call_id, output: result });
      console.log(`call    ${call.name}(${call.arguments}) = ${result}`);
    }
    const { input_tokens: prompt, input_tokens_details: details } = answer.usage;
    console.log(`reused  ${details.cached_tokens} of ${prompt} tokens of the prompt`);
  }
  const texts = answer.output.flatMap((item) => item.content ?? []).map((part) => part.text);
  console.log(`answer  ${texts.join('')}`);
}

const stream = client.responses.stream({
  model: 'smollm2',
  input: 'What is the weather in Oslo?',
  tools,
  tool_choice: 'required',
  parallel_tool_calls: false,
  store: false,
  max_output_tokens: 256,
});
let pieces = 0;
for await (const event of stream) pieces += event.type === 'response.function_call_arguments.delta';
const [call] = (await stream.finalResponse()).output;
console.log(`stream  ${pieces} pieces, ${call.name}(${JSON.stringify(JSON.parse(call.arguments))})`);
