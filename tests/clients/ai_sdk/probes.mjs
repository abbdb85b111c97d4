// Probes of the AI SDK. Each returns a value; the results of all are printed as one JSON object.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, model] = process.argv.slice(2);
const prompt = "Where is the archive?";
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "looseleaf", baseURL, apiKey: "none" });
const models = {
  responses: openai(model),
  chat: openai.chat(model),
  compatible: compatible(model),
};
const tools = {
  get_weather: tool({
    description: "The weather of a city.",
    inputSchema: z.object({ city: z.enum(["Oslo", "Rome"]), days: z.number().int() }),
    execute: async ({ city, days }) => `${city}: rain for ${days} days.`,
  }),
};
const place = z.object({ wing: z.enum(["north", "south"]), floor: z.number().int() });
const options = { maxRetries: 0, maxOutputTokens: 200, temperature: 0 };

const probes = {
  text: async (model) => {
    const result = await generateText({ model, prompt, ...options });
    return { text: result.text, reason: result.finishReason, tokens: result.usage.outputTokens };
  },
  stream: async (model) => {
    const result = streamText({ model, prompt, ...options });
    const pieces = [];
    for await (const piece of result.textStream) pieces.push(piece);
    return { text: pieces.join(""), pieces: pieces.length, reason: await result.finishReason };
  },
  object: async (model) => {
    const output = Output.object({ schema: place });
    return (await generateText({ model, prompt, output, ...options })).output;
  },
  call: async (model) => {
    const toolChoice = "required";
    const result = await generateText({ model, prompt, tools, toolChoice, ...options });
    return { name: result.toolCalls[0].toolName, input: result.toolCalls[0].input };
  },
  agent: async (model) => {
    const stopWhen = stepCountIs(4);
    const result = await generateText({ model, prompt, tools, stopWhen, ...options });
    return { text: result.text, steps: result.steps.length };
  },
  streamed_agent: async (model) => {
    const result = streamText({ model, prompt, tools, stopWhen: stepCountIs(4), ...options });
    const kinds = [];
    for await (const part of result.fullStream) kinds.push(part.type);
    return { text: await result.text, called: kinds.includes("tool-call") };
  },
};

const results = {};
for (const [name, served] of Object.entries(models)) {
  for (const [probe, run] of Object.entries(probes)) {
    try {
      results[`${name} ${probe}`] = await run(served);
    } catch (error) {
      results[`${name} ${probe}`] = { error: `${error}` };
    }
  }
}
console.log(JSON.stringify(results));
