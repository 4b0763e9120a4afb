/** Builds the page into `built/`, which is committed, and writes down what it was built from. */
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

import react from "@vitejs/plugin-react";
import { defineConfig, type Plugin } from "vite";

const OUT = "built";
const SOURCES = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"];

const sha256 = (path: string) => createHash("sha256").update(readFileSync(path)).digest("hex");

/** A test compares these digests with the files, so that no build is older than its sources. */
function recordDigests(): Plugin {
  return {
    name: "record-digests",
    closeBundle() {
      const sources = [...SOURCES, ...readdirSync("src").map((name) => `src/${name}`)].sort();
      const built = readdirSync(OUT).sort();
      const digests = {
        sources: Object.fromEntries(sources.map((path) => [path, sha256(path)])),
        built: Object.fromEntries(built.map((name) => [name, sha256(join(OUT, name))])),
      };
      writeFileSync(join(OUT, "digests.json"), `${JSON.stringify(digests, null, 2)}\n`);
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [react(), recordDigests()],
  build: {
    outDir: OUT,
    assetsDir: "",
    modulePreload: false,
    license: { fileName: "licenses.md" },
    rollupOptions: {
      output: { entryFileNames: "playground.js", assetFileNames: "playground[extname]" },
    },
  },
  server: { proxy: { "^/(v1|health|metrics|version)": process.env.DDTREE_URL ?? "http://127.0.0.1:8000" } },
});
