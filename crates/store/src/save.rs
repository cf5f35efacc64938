//! Writing: whole or not at all.

use crate::error::{Result, StoreError};
use crate::{numpy, safetensors};
use kiln_tensor::{Data, Tensor};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// Writes named tensors, as safetensors or, by the end of the file's name, as `.npz` or (one tensor) `.npy`.
pub fn save<'a>(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<()> {
    save_with(path, tensors, &BTreeMap::new())
}

/// Like [`save`], with words beside the tensors, which safetensors keep and no other format does.
pub fn save_with<'a>(
    path: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    words: &BTreeMap<String, String>,
) -> Result<()> {
    let path = path.as_ref();
    let data = read(path, tensors)?;
    write(path, &data, words)
}

/// Writes named tensors into a folder as Hugging Face does, in safetensors files of at most `bytes` each (a larger tensor has
/// one for itself) with an index, or in one without. Gives the file to open.
pub fn save_sharded<'a>(
    folder: impl AsRef<Path>,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
    bytes: usize,
) -> Result<PathBuf> {
    let folder = folder.as_ref();
    fs::create_dir_all(folder).map_err(StoreError::file(folder))?;
    let (mut shards, mut size) = (vec![Vec::new()], 0);
    for (name, tensor) in tensors {
        let own = tensor.meta().bytes();
        if size + own > bytes && size > 0 {
            (size, _) = (0, shards.push(Vec::new()));
        }
        size += own;
        shards.last_mut().into_iter().for_each(|shard| shard.push((name, tensor)));
    }
    if let [all] = &shards[..] {
        let path = folder.join("model.safetensors");
        return save(&path, all.iter().copied()).map(|()| path);
    }
    let (mut weights, mut total) = (BTreeMap::new(), 0);
    let count = shards.len();
    for (i, shard) in shards.into_iter().enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        save(folder.join(&file), shard.iter().copied())?;
        for (name, tensor) in shard {
            total += tensor.meta().bytes() as u64;
            if weights.insert(name.to_string(), file.clone()).is_some() {
                return Err(twice(folder, name));
            }
        }
    }
    let path = folder.join("model.safetensors.index.json");
    let text = safetensors::index(weights, total);
    replace(&path, |file| file.write_all(&text).map_err(StoreError::file(&path)))?;
    Ok(path)
}

fn twice(path: &Path, name: &str) -> StoreError {
    StoreError::unsupported(path, format!("two tensors are named {name}"))
}

/// The tensors' content. All reads are asked for before the first is waited for.
fn read<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a str, &'a Tensor)>,
) -> Result<BTreeMap<String, Data>> {
    let reads: Vec<_> = tensors.into_iter().map(|(name, tensor)| (name, tensor.to_data_async())).collect();
    let mut data = BTreeMap::new();
    for (name, read) in reads {
        if data.insert(name.to_string(), read.wait()?).is_some() {
            return Err(twice(path, name));
        }
    }
    Ok(data)
}

pub(crate) fn write(
    path: &Path,
    data: &BTreeMap<String, Data>,
    words: &BTreeMap<String, String>,
) -> Result<()> {
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    match (&*extension, data.iter().next()) {
        ("npz", _) => replace(path, |file| numpy::write_zip(path, file, data)),
        ("npy", Some((name, one))) if data.len() == 1 => {
            replace(path, |file| numpy::write_array(path, name, file, one))
        }
        ("npy", _) => {
            Err(StoreError::unsupported(path, format!("an .npy file holds one array, not {}", data.len())))
        }
        ("pt" | "pth" | "bin" | "gguf" | "onnx", _) => Err(StoreError::unsupported(
            path,
            format!(
                "Kiln does not write .{extension}; PyTorch reads .safetensors with safetensors.torch.load_file"
            ),
        )),
        _ => replace(path, |file| safetensors::write(path, file, data, words)),
    }
}

/// Puts a new file in the place of `path` when it is whole and on the disk.
fn replace(path: &Path, fill: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let failed = StoreError::file(path);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let temporary = path.with_file_name(format!(".{name}.{}-{count}.tmp", std::process::id()));
    let mut file = File::create(&temporary).map_err(&failed)?;
    let filled = fill(&mut file)
        .and_then(|()| file.sync_all().map_err(&failed))
        .and_then(|()| fs::rename(&temporary, path).map_err(&failed));
    if filled.is_err() {
        let _ = fs::remove_file(&temporary);
        return filled;
    }
    // The name is on the disk when its folder is.
    let folder = path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
}
