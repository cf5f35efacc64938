//! A character-level transformer on a text file.

use super::job::{self, Recipe};
use kiln::ir::philox;
use kiln::prelude::*;
use std::collections::BTreeMap;
use std::error::Error;
use std::path::PathBuf;

#[derive(clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub job: job::Args,
    /// The text to learn from.
    #[arg(long)]
    text: PathBuf,
    /// Width of the model.
    #[arg(long, default_value_t = 128)]
    width: usize,
    /// Blocks of the model.
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Characters that a sample has.
    #[arg(long, default_value_t = 64)]
    context: usize,
    /// Samples of a step.
    #[arg(long, default_value_t = 16)]
    batch: usize,
}

const HEADS: usize = 4;
/// The part of the text that is kept for testing: one in so many.
const TEST: usize = 10;
/// Samples that the test looks at.
const TESTED: usize = 64;

pub struct CharGpt {
    seed: u64,
    width: usize,
    layers: usize,
    context: usize,
    batch: usize,
    /// The text as places in `characters`; its last part is for testing.
    text: Vec<u8>,
    train: usize,
    characters: Vec<char>,
}

impl CharGpt {
    pub fn new(args: &Args) -> Result<CharGpt, Box<dyn Error>> {
        let path = args.text.display();
        let text = std::fs::read_to_string(&args.text).map_err(|e| format!("{path}: {e}"))?;
        let known = alphabet(&text);
        // Where there are more, the rarest go by one sign, so that any text will do.
        let place = |c: char| known.binary_search(&c).unwrap_or(known.len()) as u8;
        let text: Vec<u8> = text.chars().map(place).collect();
        let mut characters = known;
        if text.iter().any(|&c| c as usize == characters.len()) {
            characters.push('\u{fffd}');
        }
        let least = 2 * TEST * (args.context + 1);
        if text.len() < least {
            return Err(format!("{path}: {} characters are too few, {least} are needed", text.len()).into());
        }
        if args.width == 0
            || !args.width.is_multiple_of(HEADS)
            || args.context == 0
            || args.batch == 0
            || args.layers == 0
        {
            return Err(format!("the width is a multiple of {HEADS}, and no size is 0").into());
        }
        let train = text.len() - text.len() / TEST;
        let Args { width, layers, context, batch, .. } = *args;
        Ok(CharGpt { seed: args.job.seed, width, layers, context, batch, text, train, characters })
    }

    /// Samples that start at these places: characters, and those that follow them.
    fn samples(&self, starts: &[u32], device: &Device) -> (Tensor, Tensor) {
        let cut = |shift: usize| -> Vec<i64> {
            let window = |&s: &u32| &self.text[s as usize + shift..s as usize + shift + self.context];
            starts.iter().flat_map(window).map(|&c| c as i64).collect()
        };
        let shape = [starts.len(), self.context];
        let ids = Tensor::from_vec::<i64>(cut(0), shape, device);
        (ids, Tensor::from_vec::<i64>(cut(1), [starts.len() * self.context], device))
    }
}

/// The characters of a text in order; the 255 most frequent of more than 256, the lower of equally frequent ones.
fn alphabet(text: &str) -> Vec<char> {
    let mut counts = BTreeMap::new();
    text.chars().for_each(|c| *counts.entry(c).or_insert(0u64) += 1);
    let mut kinds: Vec<(char, u64)> = counts.into_iter().collect();
    if kinds.len() > 256 {
        // Stable: equally frequent ones stay in order.
        kinds.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        kinds.truncate(255);
        kinds.sort_unstable();
    }
    kinds.into_iter().map(|(c, _)| c).collect()
}

#[derive(Module)]
pub struct Model {
    tokens: Embedding,
    places: Embedding,
    blocks: Vec<GptBlock>,
    norm: LayerNorm,
    head: Linear,
}

impl Model {
    /// Logits of what follows each character, a row each.
    fn forward(&self, ids: &Tensor) -> Tensor {
        let x = self.tokens.forward(ids) + self.places.weight.narrow(0, 0, ids.dim(1));
        let x = self.blocks.iter().fold(x, |x, block| block.forward(&x));
        let logits = self.head.forward(&self.norm.forward(&x));
        let classes = logits.dim(-1) as isize;
        logits.reshape([-1, classes])
    }
}

impl Recipe for CharGpt {
    type Model = Model;

    fn signature(&self) -> String {
        let CharGpt { width, layers, context, batch, .. } = self;
        let text: u32 = self.text.iter().fold(0, |sum, &c| sum.wrapping_mul(31).wrapping_add(c as u32));
        format!("chargpt {width} {layers} {context} {batch} {:08x}", text)
    }

    fn steps(&self) -> u64 {
        1000
    }

    fn model(&self, device: &Device) -> Model {
        let (width, characters) = (self.width, self.characters.len());
        Model {
            tokens: Embedding::new(characters, width, device),
            places: Embedding::new(self.context, width, device),
            blocks: (0..self.layers).map(|_| GptBlock::new(width, HEADS, device)).collect(),
            norm: LayerNorm::new(width, device),
            head: Linear::new(width, characters, device).without_bias(),
        }
    }

    fn optimizer(&self) -> Adam {
        Adam::new(self.lr(0)).weight_decay(1e-1)
    }

    fn lr(&self, step: u64) -> f64 {
        // Rises for a hundred steps, then falls slowly.
        let rise = ((step + 1) as f64 / 100.0).min(1.0);
        1e-3 * rise / (1.0 + step as f64 / 2000.0)
    }

    fn batch(&self, step: u64) -> Vec<u32> {
        let places = (self.train - self.context) as u64;
        let start = |i: usize| philox::derive(self.seed, &[step, i as u64]) % places;
        (0..self.batch).map(|i| start(i) as u32).collect()
    }

    fn loss(&self, model: &Model, _: u64, _: &[u64], starts: &[u32], device: &Device) -> Tensor {
        let (ids, next) = self.samples(starts, device);
        model.forward(&ids).cross_entropy(&next)
    }

    fn about(&self) -> String {
        format!("{} characters of {} kinds", self.train, self.characters.len())
    }

    fn figures(&self, model: &Model, device: &Device) -> Result<Vec<(&'static str, f64)>, kiln::Error> {
        let span = self.text.len() - self.context - self.train;
        let starts: Vec<u32> = (0..TESTED).map(|i| (self.train + i * span / TESTED) as u32).collect();
        let (ids, next) = self.samples(&starts, device);
        let loss = no_grad(|| model.forward(&ids).cross_entropy(&next)).item::<f32>()?;
        Ok(vec![("test loss", loss as f64)])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_frequent_characters_are_kept() {
        assert_eq!(alphabet("banana"), ['a', 'b', 'n']);
        let all: String = (0..256).map(|i| char::from_u32(0x100 + i).unwrap()).collect();
        assert_eq!(alphabet(&all).len(), 256);
        // 300 rare ones below, and frequent ones above them.
        let rare: String = (0..300).map(|i| char::from_u32(0x100 + i).unwrap()).collect();
        let known = alphabet(&(rare + &"日本語".repeat(5)));
        assert_eq!(known.len(), 255);
        assert!(['日', '本', '語'].iter().all(|c| known.binary_search(c).is_ok()));
        assert!(known.binary_search(&char::from_u32(0x100 + 299).unwrap()).is_err());
    }
}
