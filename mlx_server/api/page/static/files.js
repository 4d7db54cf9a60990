// Files that a message takes along: text as text, PDF and images as data. No DOM.

const MAX_FILES = 20, MAX_BYTES = 20e6;
const IMAGE = /^data:image\/(?:png|jpeg|gif|webp);base64,[A-Za-z0-9+/=]*$/;
const PDF = /^data:application\/pdf;base64,[A-Za-z0-9+/=]*$/;

/** Reads files that were dropped or chosen. Throws an Error that says which one can't be taken. */
export async function taken(list, before = []) {
  const files = [...before];
  for (const file of list) {
    if (files.length >= MAX_FILES) throw new Error(`A message takes ${MAX_FILES} files at most.`);
    if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than 20 MB.`);
    files.push(await fileOf(file));
  }
  return files;
}

async function fileOf(file) {
  const { name } = file;
  if (/^image\/(png|jpeg|gif|webp)$/.test(file.type) || file.type === "application/pdf") {
    return { name, data: await dataUrl(file) };
  }
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return { name, text };
  } catch { /* it is no text */ }
  throw new Error(`${name} is neither text (UTF-8) nor PDF, PNG, JPEG, GIF or WebP.`);
}

const dataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(new Error(`${file.name} can't be read.`));
  reader.readAsDataURL(file);
});

export const isImage = ({ data }) => data !== undefined && IMAGE.test(data);

/** The files of a stored message, as far as they are such. */
export function readFiles(stored) {
  return (Array.isArray(stored) ? stored : []).slice(0, MAX_FILES).flatMap((file) => {
    const { name, text, data } = file ?? {};
    if (typeof name !== "string") return [];
    if (typeof text === "string") return [{ name, text }];
    return typeof data === "string" && (IMAGE.test(data) || PDF.test(data)) ? [{ name, data }] : [];
  });
}

/** A message's content for /v1/chat/completions: the text alone, or parts. */
export function contentOf(text, files = []) {
  if (!files.length) return text;
  const parts = files.map((file) => {
    if (file.text !== undefined) return { type: "text", text: `${file.name}:\n\n${file.text}` };
    if (isImage(file)) return { type: "image_url", image_url: { url: file.data } };
    return { type: "file", file: { filename: file.name, file_data: file.data } };
  });
  return text ? [...parts, { type: "text", text }] : parts;
}

/** The same content for /v1/responses. */
export function inputOf(content) {
  if (typeof content === "string") return content;
  return content.map((part) => {
    if (part.type === "image_url") return { type: "input_image", image_url: part.image_url.url };
    if (part.type === "file") return { type: "input_file", ...part.file };
    return { type: "input_text", text: part.text };
  });
}
