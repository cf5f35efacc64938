//! Models from files and into them.

use crate::error::{Result, StoreError};
use crate::file::TensorFile;
use kiln_nn::{LoadReport, Module};
use kiln_tensor::{Device, Tensor};
use regex_lite::Regex;
use std::collections::BTreeMap;
use std::path::Path;

/// How a file is loaded into a model: strictly, or what fits; and what names become.
#[derive(Clone, Debug, Default)]
pub struct Load {
    partial: bool,
    rules: Vec<(String, String)>,
}

impl Load {
    /// Everything must be there, wanted and fit.
    pub fn strict() -> Load {
        Load::default()
    }

    /// What fits is loaded; the report says what did not.
    pub fn partial() -> Load {
        Load { partial: true, ..Load::default() }
    }

    /// A name that matches all of the regular expression `from` becomes `to`, in which `$1` is the first group. Rules apply
    /// in order, each to what the one before has made.
    ///
    /// ```
    /// # use kiln_store::Load;
    /// let load = Load::strict().rename("module\\.(.*)", "$1").rename("(.*)\\.gamma", "$1.weight");
    /// ```
    pub fn rename(mut self, from: &str, to: &str) -> Load {
        self.rules.push((from.into(), to.into()));
        self
    }

    /// What the rules make of names. Two that become one are an error.
    fn renamed<'a>(
        &self,
        file: &TensorFile,
        names: impl Iterator<Item = &'a str>,
    ) -> Result<BTreeMap<String, &'a str>> {
        let rule = |(from, to): &(String, String)| match Regex::new(&format!("^(?:{from})$")) {
            Ok(regex) => Ok((regex, to.clone())),
            Err(e) => Err(StoreError::Rule { rule: from.clone(), reason: e.to_string() }),
        };
        let rules: Vec<(Regex, String)> = self.rules.iter().map(rule).collect::<Result<_>>()?;
        let mut all = BTreeMap::new();
        for name in names {
            let new = rules.iter().fold(name.to_string(), |name, (from, to)| match from.is_match(&name) {
                true => from.replace(&name, to.as_str()).into_owned(),
                false => name,
            });
            if let Some(other) = all.insert(new.clone(), name) {
                let reason = format!("{other} and {name} both become {new}");
                return Err(StoreError::damaged(file.path(), reason));
            }
        }
        Ok(all)
    }
}

/// Saves and loads models.
pub trait ModelFile: Module {
    /// Writes all parameters and buffers to a file, as safetensors or, if its name ends so, `.npz`. The file is whole or
    /// not there: what was there before stays until then.
    fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        crate::save(path, self.state_dict().iter().map(|(name, tensor)| (name.as_str(), tensor)))
    }

    /// Takes over all parameters and buffers from a file that [`TensorFile::open`] can read, in the model's dtypes and on
    /// its devices. If something is missing, unused or of another shape, the model is left as it was; the error says what.
    fn load(&mut self, path: impl AsRef<Path>) -> Result<LoadReport> {
        self.load_with(path, Load::strict())
    }

    /// Like [`ModelFile::load`], partially or under other names.
    fn load_with(&mut self, path: impl AsRef<Path>, load: Load) -> Result<LoadReport> {
        let file = TensorFile::open(path)?;
        let names = load.renamed(&file, file.metas().map(|(name, _)| name))?;
        let lost = load.renamed(&file, file.unsupported().keys().map(String::as_str))?;
        // Each is read to where the model has it.
        let mut places: BTreeMap<String, Device> = BTreeMap::new();
        self.visit("", &mut |path, tensor| drop(places.insert(path.into(), tensor.device())));
        self.visit_buffers("", &mut |path, buffer| drop(places.insert(path.into(), buffer.get().device())));
        if !load.partial
            && let Some((_, name)) = lost.iter().find(|(new, _)| places.contains_key(*new))
        {
            file.data(name)?;
        }
        let mut state = BTreeMap::new();
        for (new, name) in names {
            let tensor = match places.get(&new) {
                Some(device) => file.tensor(name, device)?,
                // What the model does not have is told by its name and not read.
                None => Tensor::zeros([0], &Device::cpu()),
            };
            state.insert(new, tensor);
        }
        let loaded = match load.partial {
            true => self.load_state_dict_partial(&state),
            false => self.load_state_dict(&state),
        };
        loaded.map_err(|source| StoreError::Load { path: file.path().into(), source })
    }
}

impl<M: Module + ?Sized> ModelFile for M {}
