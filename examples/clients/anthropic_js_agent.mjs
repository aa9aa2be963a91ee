// An agent with two tools on Anthropic's official JavaScript SDK; nothing here is about ctxreuse but the address.
//
// ctxreuse-edge serve                 # in another terminal
// npm install @anthropic-ai/sdk
// node examples/clients/anthropic_js_agent.mjs [URL]

import Anthropic from "@anthropic-ai/sdk";

const functions = {
  get_weather: ({ city }) => `It is sunny in ${city}.`,
  add: ({ a, b }) => String(a + b),
};
const tool = (name, description, properties) => ({
  name,
  description,
  input_schema: { type: "object", properties, required: Object.keys(properties), additionalProperties: false },
});
const tools = [
  tool("get_weather", "The weather in a city", { city: { type: "string" } }),
  tool("add", "Add two integers", { a: { type: "integer" }, b: { type: "integer" } }),
];
const common = {
  model: "smollm2",
  system: "You help with the weather and with sums.",
  tools,
  max_tokens: 64,
  temperature: 0,
  cache_control: { type: "ephemeral" },
};

const baseURL = process.argv[2] ?? "http://127.0.0.1:7351";
const client = new Anthropic({ baseURL, apiKey: "none", timeout: 600_000 });
const messages = [];
for (const question of ["What is the weather in Paris?", "Add 2 and 3.", "And in Rome?"]) {
  messages.push({ role: "user", content: question });
  // A model of a billion parameters or more decides by itself: { type: "auto" }.
  for (const type of ["any", "none"]) {
    const stream = client.messages.stream({ ...common, messages, tool_choice: { type } });
    const answer = await stream.finalMessage();
    messages.push({ role: "assistant", content: answer.content });
    const results = [];
    for (const block of answer.content.filter((block) => block.type === "tool_use")) {
      const content = functions[block.name](block.input);
      results.push({ type: "tool_result", tool_use_id: block.id, content });
      console.log(`call    ${block.name}(${JSON.stringify(block.input)}) = ${content}`);
    }
    if (results.length) messages.push({ role: "user", content: results });
    else console.log(`answer  ${answer.content.map((block) => block.text).join(" ")}`);
    const { input_tokens, cache_creation_input_tokens, cache_read_input_tokens } = answer.usage;
    const prompt = input_tokens + cache_creation_input_tokens + cache_read_input_tokens;
    console.log(`reused  ${cache_read_input_tokens} of ${prompt} tokens of the prompt`);
  }
}
